"""Pre-tokenization: the regular expressions that cut text into words, by the names of `tokenizer.pattern`."""

from typing import Literal

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = (  # letters with their accents and vowel signs, which the others cut off; a capital begins a word, so does one after small letters
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = GPT4.replace(r"\p{N}{1,3}", r"\p{N}")  # a token for every digit

# GPT-4's split, except that a line break keeps the indentation after it (all but the last space, which belongs to the word), together
# with the punctuation before it: "):\n       " is one token. Bytes a token on held-out stdlib files at 4,096 tokens: 3.58; with
# GPT-4's split 3.37, with GPT-2's 3.42.
_INDENT = r"(?:[ \t]+(?!\S))?"
OWN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+(?:[\r\n]+{_INDENT})?|\s*[\r\n]+{_INDENT}|\s+(?!\S)|\s+"
)

Pattern = Literal["own", "gpt2", "gpt4", "gpt4o", "llama3", "qwen2"]
SPLITS: dict[Pattern, str] = {"own": OWN, "gpt2": GPT2, "gpt4": GPT4, "gpt4o": GPT4O, "llama3": GPT4, "qwen2": QWEN2}
