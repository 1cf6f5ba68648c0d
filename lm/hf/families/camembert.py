"""CamemBERT.  Martin et al. 2019, arXiv:1911.03894."""

from lm.hf.families.roberta import Roberta


class Camembert(Roberta):
    """RoBERTa in French."""

    name = "camembert"
    architecture = "CamembertForMaskedLM"


FAMILY = Camembert()
