"""XLM-RoBERTa, of which multilingual encoders are tuned.  Conneau et al. 2019, arXiv:1911.02116."""

from lm.hf.families.roberta import Roberta


class XLMRoberta(Roberta):
    """RoBERTa with a vocabulary of a hundred languages."""

    name = "xlm-roberta"
    architecture = "XLMRobertaForMaskedLM"


FAMILY = XLMRoberta()
