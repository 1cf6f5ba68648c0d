"""Falcon Mamba.  Zuo et al. 2024, arXiv:2410.05355."""

from lm.hf.families.mamba import Mamba


class FalconMamba(Mamba):
    """Mamba with norms without weights on what says the steps, and on what is written to the state and read from it."""

    name = "falcon_mamba"
    architecture = "FalconMambaForCausalLM"
    fields = {**Mamba.fields, "recurrent.inner_eps": ("mixer_rms_eps", 1e-6)}
    further = (*Mamba.further, "use_falcon_mambapy")
    fixed = {key: value for key, value in Mamba.fixed.items() if key != "recurrent.inner_eps"}


FAMILY = FalconMamba()
