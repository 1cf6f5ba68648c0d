"""Chat templates are programs: what they cannot reach, and what they cannot take."""

import gc
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lm.data.kinds import BytesConfig
from lm.data.tokenizer.chat import ChatTemplate
from lm.data.tokenizer.tokenizer import Tokenizer
from lm.errors import ConfigError
from tests.conftest import on_linux
from tests.data.tokenizer.test_chat import CHATML, TURNS, source


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return BytesConfig().build(extra=CHATML)


CLIMBS = {
    "globals": "{{ messages.__class__.__init__.__globals__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "item": "{{ ''['__class__']['__mro__'] }}",
    "attr": "{{ ('' | attr('__class__')).__mro__ }}",
    "map": "{{ (messages | map(attribute='__class__') | first).__mro__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format by attr": "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
    "format_map": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "its functions": "{{ raise_exception.__globals__.x }}",
    "jinja's functions": "{{ cycler.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", CLIMBS)
def test_no_template_reaches_what_python_keeps_in_attributes(tokenizer: Tokenizer, name: str) -> None:
    """Seen to fail with a plain Environment in place of the sandboxed one."""
    with pytest.raises(ConfigError, match=r"^here: the chat template fails \(.*(unsafe|not safely callable|undefined)"):
        ChatTemplate(CLIMBS[name], "here", tokenizer).runs(TURNS)


GROWING = "{% set n = namespace(x=START) %}{% for i in range(40) %}{% set n.x = STEP %}{% endfor %}{{ n.x | length }}"


def growing(start: str, step: str) -> str:
    return GROWING.replace("START", start).replace("STEP", step)


MEMORY, TIME = "more than 192 MiB of memory", "more than a second"
BOMBS = {
    "concatenation": (growing("'x'", "n.x ~ n.x"), MEMORY),
    "sum": (growing("'x'", "n.x + n.x"), MEMORY),
    "lists": (growing("[1]", "n.x + n.x"), MEMORY),
    "replace": (growing("'x'", "n.x.replace('x', 'xx')"), f"{MEMORY}|{TIME}"),
    "join": (growing("'x'", "[n.x, n.x] | join"), MEMORY),
    "percent": (growing("'x'", "'%s%s' % (n.x, n.x)"), MEMORY),
    "block": ("{% set a %}{% for i in range(99999) %}" + "x" * 60_000 + "{% endfor %}{% endset %}", MEMORY),
    "product": ("{{ 'x' * 10 ** 9 }}", MEMORY),
    "of a list": ("{{ [1] * 10 ** 9 }}", MEMORY),
    "width": ("{{ '%1000000000d' % 1 }}", MEMORY),
    "format": ("{{ '{:>1000000000}'.format('x') }}", MEMORY),
    "center": ("{{ 'x'.center(1000000000) }}", MEMORY),
    "filter": ("{{ 'x' | center(1000000000) }}", MEMORY),
    "indent": ("{{ 'x\nx' | indent(1000000000) }}", MEMORY),
    "json": ("{{ [1] | tojson(indent=1000000000) }}", MEMORY),
    "to_bytes": ("{{ (1).to_bytes(1000000000, 'big') }}", MEMORY),
    "shared lists": (growing("['x']", "[n.x, n.x]").replace("length", "string"), f"{MEMORY}|{TIME}"),
    "squares": (growing("3", "n.x * n.x").replace("length", "string"), f"{MEMORY}|{TIME}"),
    "power": ("{{ 10 ** (10 ** 10) }}", f"{MEMORY}|{TIME}"),
    "range": ("{% for i in range(10 ** 9) %}x{% endfor %}", "Range too big"),
    "ranges": ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", TIME),
    "macro": ("{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(40) }}", TIME),
    "words": ("{{ lipsum(n=100000000) }}", f"{MEMORY}|{TIME}"),
    "output": ("{% for i in range(1000) %}" + "x" * 60_000 + "{% endfor %}", "more than 16,777,216 characters"),
}


ALIKE = (
    "macro",
    "percent",
    "output",
    "product",
    "range",
    "replace",
    "concatenation",
    "join",
    "of a list",
    "width",
    "format",
    "center",
    "filter",
    "indent",
    "json",
    "to_bytes",
    "squares",
    "power",
    "ranges",
    "words",
    "shared lists",
)


@on_linux
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in BOMBS])
def test_a_template_that_takes_too_much_is_ended_and_its_process_with_it(tokenizer: Tokenizer, name: str) -> None:
    """Seen to fail with RLIMIT_AS removed (memory), and with the timer removed (they did not end)."""
    template, message = BOMBS[name]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = used.ru_utime + used.ru_stime
    with pytest.raises(ConfigError, match=rf"^here: the chat template (fails|cannot be read) \(.*({message})"):
        ChatTemplate(template, "here", tokenizer).runs(TURNS)
    gc.collect()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - began < 4  # seconds of the processor, the start with them


@pytest.mark.slow
@on_linux
def test_what_bombs_take_at_most_stays_below_200_megabytes() -> None:
    """Of the program and of the template's process, in a fresh one of each."""
    program = (
        "import re, resource, sys\nfrom lm.data.tokenizer.sandbox import Template\nfrom lm.errors import ConfigError\n"
        "most = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"  # without its parent's
        "before = most()\n"
        "for template in sys.argv[1:]:\n"
        "    try:\n        Template(template, 'here').render([], {})\n        raise SystemExit('not refused')\n"
        "    except ConfigError:\n        pass\n"
        "print(most() - before, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    bombs = [BOMBS[name][0] for name in ("concatenation", "product", "lists")]
    own, other = subprocess.run([sys.executable, "-c", program, *bombs], capture_output=True, text=True, check=True).stdout.split()
    assert int(own) < 50_000 and int(other) < 200_000  # KiB


BROKEN = {
    "import": ("{% import 'os' as os %}", "no loader"),
    "its own": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "missing": ("{{ messages[0].nothing.at_all }}", "nothing"),
    "syntax": ("{% for %}", "Expected an expression"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_refused_with_what_jinja_says(tokenizer: Tokenizer, name: str) -> None:
    template, message = BROKEN[name]
    with pytest.raises(ConfigError, match=rf"^here: the chat template (fails|cannot be read) \(.*{message}"):
        ChatTemplate(template, "here", tokenizer).runs(TURNS)


@pytest.mark.slow
@on_linux
def test_the_process_of_a_template_ends_with_it(tokenizer: Tokenizer) -> None:
    """Seen to fail behind tests of serving, whose templates have processes of their own for as long as their servers."""
    children = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children")
    gc.collect()
    others = children.read_text().split()
    template = ChatTemplate(source("plain"), "here", tokenizer)
    (mine,) = [pid for pid in children.read_text().split() if pid not in others]
    assert "rendering.py" in Path(f"/proc/{mine}/cmdline").read_text()
    assert template.runs(TURNS)
    del template
    gc.collect()
    assert not Path(f"/proc/{mine}").exists()


def test_a_template_of_a_megabyte_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="a chat template of 1,000,000 characters is over 65,536"):
        ChatTemplate("x" * 1_000_000, "here", tokenizer)
