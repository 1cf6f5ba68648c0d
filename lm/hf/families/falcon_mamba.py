"""Falcon Mamba.  Zuo et al. 2024, arXiv:2410.05355."""

from lm.errors import ConfigError
from lm.hf.families.mamba import Mamba
from lm.hf.io.family import without
from lm.schema import Tree


class FalconMamba(Mamba):
    """Mamba with norms without weights on what says the steps, and on what is written to the state and read from it."""

    name = "falcon_mamba"
    architecture = "FalconMambaForCausalLM"
    fields = {**Mamba.fields, "recurrent.inner_eps": ("mixer_rms_eps", 1e-6)}
    further = (*Mamba.further, "use_falcon_mambapy")
    fixed = without(Mamba.fixed, "recurrent.inner_eps")

    def read(self, hf: Tree) -> Tree:
        if hf.get("mixer_rms_eps", 1e-6) is None:
            raise ConfigError("config.json: mixer_rms_eps=null leaves out norms that every falcon_mamba has. Use mamba, or give a number.")
        return super().read(hf)


FAMILY = FalconMamba()
