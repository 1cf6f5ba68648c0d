"""Whether an answer is a valid program, checked in a separate process: nothing is executed, and overflowing the parser kills only that."""

import re
import subprocess
import sys
from typing import Literal

from pydantic import Field

from lm.data.rewards.base import Answer, RewardConfig

_FENCE = re.compile(r"```(?:([\w+#.-]+)[^\n`]*|[ \t\r]*)\n(.*?)```", re.DOTALL)  # of any language, so that its end begins none
_PYTHON = ("", "python", "python3", "py")
_PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
try:
    resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
except ValueError:
    pass
sys.stderr = None
compile(sys.stdin.read(), "answer", "exec", dont_inherit=True)
"""


class CompilesReward(RewardConfig):
    """1 where the answer, or the last of its fenced blocks that name Python or no language, is Python that compiles and says something;
    else 0."""

    kind: Literal["compiles"] = "compiles"
    timeout_s: float = Field(5.0, gt=0, le=60)
    """After so many seconds it does not compile."""

    def score(self, answer: Answer) -> float:
        blocks = [block for language, block in _FENCE.findall(answer.text) if language.lower() in _PYTHON]
        code = (blocks or [answer.text])[-1]
        if not code.strip():
            return 0.0
        try:
            asked = [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM]  # whatever the locale says
            done = subprocess.run(asked, input=code.encode(), capture_output=True, timeout=self.timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return 0.0
        return float(done.returncode == 0)
