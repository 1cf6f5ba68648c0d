"""What an answer is worth, and what happens where a reward breaks."""

import math
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from lm.data.kinds import Answer, RewardConfig
from lm.data.rewards.base import scores, total
from lm.errors import ConfigError
from lm.schema import Config, from_tree


class Wraps(Config):
    reward: RewardConfig


def answer(text: str, reference: str = "46", n_tokens: int = 3, ended: bool = True) -> Answer:
    return Answer("12+34", text, reference, n_tokens, ended)


def reward(kind: str, **options: Any) -> RewardConfig:
    return from_tree(Wraps, {"reward": {"kind": kind, **options}}).reward


@pytest.mark.parametrize(
    ("kind", "options", "said", "expected"),
    [
        ("exact", {}, answer(" 46\n"), 1.0),
        ("exact", {}, answer("46."), 0.0),
        ("arithmetic", {}, answer("12 and 34 make 46."), 1.0),
        ("arithmetic", {}, answer("46 or 47"), 0.0),
        ("arithmetic", {}, answer("about 1,046.50", "1046.5"), 1.0),
        ("arithmetic", {}, answer("-46"), 0.0),
        ("arithmetic", {}, answer("So it is in 45-46"), 1.0),
        ("arithmetic", {}, answer("step-46"), 1.0),
        ("arithmetic", {}, answer("x=\N{MINUS SIGN}46"), 0.0),
        ("arithmetic", {}, answer("\N{MINUS SIGN}46", "x = -46"), 1.0),
        ("arithmetic", {}, answer("none", "none"), 0.0),
        ("regex", {"pattern": r"<b>\d+</b>"}, answer("<b>46</b>"), 1.0),
        ("regex", {"pattern": r"<b>\d+</b>"}, answer("so <b>46</b>"), 0.0),
        ("regex", {"pattern": ".*46"}, answer("so\n46"), 1.0),
        ("ended", {}, answer("46", ended=False), 0.0),
        ("length", {"free": 10, "most": 20}, answer("", n_tokens=10), 0.0),
        ("length", {"free": 10, "most": 20}, answer("", n_tokens=15), -0.5),
        ("length", {"free": 10, "most": 20}, answer("", n_tokens=99), -1.0),
        ("compiles", {}, answer("def f(x):\n    return x"), 1.0),
        ("compiles", {}, answer("Thus:\n```python\nx = 1\n```\nas asked"), 1.0),
        ("compiles", {}, answer("```bash\npip install x\n```\nThen run this.\n```python\nx = 1\n```"), 1.0),
        ("compiles", {}, answer("```Python3 title=a.py\nx = 1\n```\nIt gives\n```text\n1 2\n```"), 1.0),
        ("compiles", {}, answer("```\nx = 1\n```\nor\n```py\nx = = 1\n```"), 0.0),
        ("compiles", {}, answer("def f(x) return x"), 0.0),
        ("compiles", {}, answer("  \n"), 0.0),
        ("compiles", {}, answer("(" * 100_000), 0.0),
        ("compiles", {}, answer("raise SystemExit(3)"), 1.0),  # it is read, not run
    ],
)
def test_each_reward_is_what_it_says(kind: str, options: dict[str, Any], said: Answer, expected: float) -> None:
    assert reward(kind, **options).score(said) == expected


@pytest.mark.skipif(shutil.which("localedef") is None, reason="localedef, of Debian's package locales, makes a locale")
def test_code_with_letters_compiles_in_a_locale_of_latin_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the two bytes of an a with dots are a letter and a currency sign."""
    made = ["localedef", "-i", "en_US", "-f", "ISO-8859-1", str(tmp_path / "en_US.ISO-8859-1")]
    if subprocess.run(made, capture_output=True).returncode:
        pytest.skip("this machine has no sources of locales")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    monkeypatch.setenv("LC_ALL", "en_US.ISO-8859-1")
    assert reward("compiles").score(answer("\N{LATIN SMALL LETTER A WITH DIAERESIS} = 1")) == 1.0


class BrokenReward(RewardConfig):
    kind: Literal["broken"] = "broken"
    gives: float | None = None

    def score(self, answer: Answer) -> float:
        return math.nan if self.gives is None else 1 / self.gives


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            BrokenReward(),
            r"^objective\.rewards\.mine: it gave nan for the answer '46', and a number of at most 1e\+15 is needed\. Mend it\.$",
        ),
        (BrokenReward(gives=2.0**-99), r"^objective\.rewards\.mine: it gave 6\.3\S+e\+29 for the answer '46', and a number of at most"),
        (BrokenReward(gives=0.0), r"^objective\.rewards\.mine: it broke on the answer '46' \(ZeroDivisionError: float division by zero\)"),
    ],
)
def test_a_reward_that_breaks_is_named_with_the_answer(broken: RewardConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scores({"mine": broken}, [answer("46")])


class SlowReward(RewardConfig):
    kind: Literal["slow"] = "slow"

    def score(self, answer: Answer) -> float:
        time.sleep(2 if answer.text == "46" else 0)
        return 1.0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_reward_that_takes_long_is_named_with_the_answer(
    threads: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen: a run that a reward held for good said nothing."""
    monkeypatch.setattr("lm.data.rewards.base._SLOW_S", 0.4)
    assert scores({"mine": SlowReward()}, [answer("45"), answer("46")], threads) == [{"mine": 1.0}] * 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) > 1
    assert all(re.fullmatch(r"objective\.rewards\.mine: it has taken [0-2] s so far for the answer '46'", line) for line in told), told
    time.sleep(0.5)
    assert not capsys.readouterr().err


class AskingReward(RewardConfig):
    kind: Literal["asking"] = "asking"

    def score(self, answer: Answer) -> float:
        return total({"exact": reward("exact")}, scores({"exact": reward("exact")}, [answer])[0])


def test_a_reward_may_ask_others() -> None:
    """Seen to fail: KeyError, as what was under way in the thread was noted once."""
    assert scores({"mine": AskingReward()}, [answer("46"), answer("45")]) == [{"mine": 1.0}, {"mine": 0.0}]


class LeavingReward(RewardConfig):
    kind: Literal["leaving"] = "leaving"

    def score(self, answer: Answer) -> float:
        raise SystemExit(3)


def test_a_reward_that_leaves_the_program_has_broken() -> None:
    """As a checker with a main() of its own does. Seen to fail: the run ended with exit code 3 and no word."""
    with pytest.raises(ConfigError, match=r"it broke on the answer '46' \(SystemExit: 3\)\. Mend it"):
        scores({"mine": LeavingReward()}, [answer("46")])


def test_what_breaks_in_a_plugin_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LM_PLUGINS", __file__)
    line = BrokenReward.score.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"\(ZeroDivisionError: float division by zero, at {re.escape(__file__)}:{line}\)\. Mend it"):
        scores({"mine": BrokenReward(gives=0.0)}, [answer("46")])


def test_rewards_add_up_by_their_weights() -> None:
    rewards = {"right": reward("exact", weight=2.0), "long": reward("length", free=1, most=5, weight=0.5)}
    [each] = scores(rewards, [answer("46")])
    assert each == {"right": 1.0, "long": -0.5} and total(rewards, each) == 1.75


def test_answers_are_scored_at_a_time_where_threads_are_given_and_stay_in_order() -> None:
    """Four threads wait for each other; one would wait for ever, and gives up."""
    together = threading.Barrier(4)

    class WaitingReward(RewardConfig):
        kind: Literal["waiting"] = "waiting"

        def score(self, answer: Answer) -> float:
            together.wait(20)
            return float(answer.text)

    texts = ["3", "1", "2", "0"]
    found = scores({"all": WaitingReward()}, [answer(text) for text in texts], threads=4)
    assert found == [{"all": float(text)} for text in texts]
    with pytest.raises(ConfigError, match="it broke on the answer '46'"):
        scores({"mine": BrokenReward(gives=0.0)}, [answer("46")] * 3, threads=2)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [("regex", {"pattern": "("}, r"pattern: '\(' is no pattern"), ("length", {"free": 5, "most": 5}, "free=5 is not below most=5")],
)
def test_a_reward_that_cannot_be_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reward(kind, **options)
