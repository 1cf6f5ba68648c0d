"""data2vec of text, with its head for masked tokens.  Baevski et al. 2022, arXiv:2202.03555."""

from lm.hf.families.roberta import Roberta


class Data2VecText(Roberta):
    """RoBERTa under another name."""

    name = "data2vec-text"
    architecture = "Data2VecTextForMaskedLM"
    root = "data2vec_text."
    ignored = tuple(pattern.replace("roberta", "data2vec_text") for pattern in Roberta.ignored)


FAMILY = Data2VecText()
