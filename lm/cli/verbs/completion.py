"""`lm completion bash|zsh|fish`: what a shell needs to complete verbs, keys, options and recipes."""

from collections.abc import Iterator

from lm.cli.compose import catalog
from lm.cli.compose.naming import known_keys
from lm.cli.compose.quoting import path_of
from lm.cli.main import VERBS
from lm.cli.verb import Verb, find
from lm.errors import ConfigError
from lm.printing import answer
from lm.schema import members
from lm.spelling import did_you_mean

_BASH = """\
# lm completion bash: put it into ~/.bashrc as  eval "$(lm completion bash)"
_lm() {
    local line="${COMP_LINE:0:COMP_POINT}" words
    local word="${line##* }" verb="${COMP_WORDS[1]}"
    [ "$COMP_CWORD" -eq 1 ] && verb=
    case "$verb" in
%(cases)s
        *) words=;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%%=*}="}")
    fi
}
complete -o nospace -o default -F _lm lm
"""
_ZSH = """\
#compdef lm
# lm completion zsh: put it into ~/.zshrc, behind compinit, as  eval "$(lm completion zsh)"
_lm() {
    local -a found
    local verb="$words[2]"
    (( CURRENT == 2 )) && verb=
    case "$verb" in
%(cases)s
    esac
    compadd -S '' -- $found || _files
}
compdef _lm lm
"""
_FISH = """\
# lm completion fish: lm completion fish > ~/.config/fish/completions/lm.fish
complete -c lm -n __fish_use_subcommand -f -a '%(verbs)s'
%(cases)s
"""


class Completion(Verb):
    """usage: lm completion bash|zsh|fish

    Prints what the shell needs to complete verbs, keys, options and recipes:

      eval "$(lm completion bash)"      in ~/.bashrc
      eval "$(lm completion zsh)"       in ~/.zshrc, behind compinit
      lm completion fish > ~/.config/fish/completions/lm.fish
    """

    words = ("bash", "zsh", "fish")

    def run(self, rest: list[str]) -> None:
        """Prints the script."""
        shells = {"bash": _bash, "zsh": _zsh, "fish": _fish}
        if len(rest) != 1 or rest[0] not in shells:
            given = f"'{' '.join(rest)[:80]}' is no shell" if rest else "no shell was given"
            raise ConfigError(f"completion: {given}. {did_you_mean(' '.join(rest), shells)}")
        answer(shells[rest[0]]())


def _bash() -> str:
    cases = [f'        "") words="{" ".join(VERBS)}";;', *(f"        {verb}) words={_quoted(words)};;" for verb, words in _words())]
    return _BASH % {"cases": "\n".join(cases)}


def _zsh() -> str:
    cases = [f'        "") found=({" ".join(VERBS)});;', *(f"        {verb}) found=({_quoted(words, ' ')});;" for verb, words in _words())]
    return _ZSH % {"cases": "\n".join(cases)}


def _fish() -> str:
    cases = [f"complete -c lm -n '__fish_seen_subcommand_from {verb}' -a {_quoted(words)}" for verb, words in _words()]
    return _FISH % {"verbs": " ".join(VERBS), "cases": "\n".join(cases)}


def _quoted(words: list[str], each: str = "") -> str:
    """Returns the words in single quotes, all together or, with `each` between them, one by one; no word contains a quote."""
    return each.join(f"'{word}'" for word in words) if each else f"'{' '.join(words)}'"


def _words() -> Iterator[tuple[str, list[str]]]:
    """Yields each verb with the words that may follow it."""
    groups = catalog.groups()
    train = [f"{key}=" for key in sorted(known_keys()) if key.replace(".", "/") not in groups]
    train += [f"{group}={option}" for group, options in groups.items() for option in options]
    for name in VERBS:
        verb = find(name)
        own = [f"{key.rstrip('_')}={choice}" for key, field in verb.model_fields.items() for choice in _choices(field.annotation)]
        taken = [word for word in train if verb.takes is None or path_of(word).partition(".")[0] in verb.takes]
        yield name, [*(verb.words or ()), *own, *taken]


def _choices(annotation: object) -> list[str]:
    """Returns the values of a Literal or bool; for other annotations one empty text."""
    found = [str(choice) for part in members(annotation) for choice in getattr(part, "__args__", ()) if isinstance(choice, str)]
    return [*found, *(["true", "false"] if bool in members(annotation) else [])] or [""]
