"""Gemma 4 of 12 B, the text model of a class of its own.  Google 2026."""

from lm.hf.families.gemma4 import KEYS, Gemma4


class Gemma4Unified(Gemma4):
    """Gemma 4 with neither experts nor vectors of layers."""

    name = "gemma4_unified_text"
    architecture = "Gemma4UnifiedForCausalLM"
    rare = True
    window = 1024
    channels = 0
    further = KEYS


FAMILY = Gemma4Unified()
