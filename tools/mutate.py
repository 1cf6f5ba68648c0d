"""Plant one-line faults in lm/nn/ one at a time, and see the suite fail each time. A fault that survives is a hole in the tests.

python tools/mutate.py            # all; prints caught/total as JSON, exit 1 if one survives
python tools/mutate.py only=3,7
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# (what goes wrong, file below lm/nn, text, what it becomes); the text must stand in the file exactly once
MUTATIONS = [
    ("an off-by-one window", "mask.py", "(q - k < window)", "(q - k <= window)"),
    ("a token sees the next one", "mask.py", "(k <= q)", "(k <= q + 1)"),
    ("packed documents see each other", "mask.py", "seen & (self.q_documents.unsqueeze(-1) == self.k_documents.unsqueeze(-2))", "seen"),
    ("padding is seen", "mask.py", "seen = (k >= 0) & (q >= 0)", "seen = (k >= -1) & (q >= -1)"),
    ("keys are not rotated", "position.py", "return rotate(q, *angles), rotate(k, *angles)", "return rotate(q, *angles), k"),
    ("queries are rotated twice", "position.py", "return rotate(q, *angles), rotate", "return rotate(rotate(q, *angles), *angles), rotate"),
    ("the rotation turns the wrong way in one half", "rope.py", "second * cos + first * sin", "second * cos - first * sin"),
    ("the fast rotation's gradient turns forward", "rope.py", "_turn(grads[0], cos, -sin)", "_turn(grads[0], cos, sin)"),
    ("qkv bias dropped from the values", "attention.py", "self.v = nn.Linear(d_model, kv_width, bias=cfg.qkv_bias)", "self.v = nn.Linear(d_model, kv_width, bias=False)"),
    ("q and k norms are swapped", "attention.py", "q, k = self.q_norm(q), self.k_norm(k)\n        q, k, v = q.transpose", "q, k = self.k_norm(q), self.q_norm(k)\n        q, k, v = q.transpose"),
    ("global layers one too early", "attention.py", "(layer + 1) % self.global_every == 0", "layer % self.global_every == 0"),
    ("scores scaled by the head's width, not its root", "attention.py", "1 / math.sqrt(self.head_dim)", "1 / self.head_dim"),
    ("pre-norm becomes output-norm", "norm.py", "return x + self.dropout(sublayer(self.norm(x)))", "return x + self.dropout(self.norm(sublayer(x)))"),
    ("rms norm forgets eps", "norm.py", "mean_square.add_(eps).rsqrt_()", "mean_square.rsqrt_()"),
    ("the rms gradient loses its mean term", "norm.py", "dx.addcmul_((g @ w).unsqueeze(-1), inverse / d)", "dx.add_(0)"),
    ("the gate is applied to the wrong side", "ffn.py", "self.act(self.gate(x)) * self.up(x)", "self.gate(x) * self.act(self.up(x))"),
    ("the parallel block reads one norm twice", "block.py", "g = h if self.ffn_norm is None else self.ffn_norm(x)", "g = h"),
    ("the final norm is skipped", "transformer.py", "x = self.norm(x)", "x = x"),
    ("the soft-cap of the head is skipped", "transformer.py", "return logits if self.softcap is None else", "return logits if True else"),
    ("a ring buffer one slot short", "cache.py", "min(max_len, layer.window + slack)", "min(max_len, layer.window + slack - 2)"),
    ("rewind keeps a token", "cache.py", "self.written -= n", "self.written -= n - 1"),
    ("an unlabelled token counts", "loss.py", "(log_z.square() * (labels != IGNORED)).sum()", "log_z.square().sum()"),
]  # fmt: skip


def survives(copy: Path, file: str, before: str, after: str) -> bool:
    """Whether the tests of lm/nn pass on the mutated copy."""
    path = copy / "lm" / "nn" / file
    original = path.read_text()
    if original.count(before) != 1:
        raise SystemExit(f"tools/mutate.py: {file} holds the text {original.count(before)} times, not once: {before}")
    path.write_text(original.replace(before, after))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "tests/nn", "tests/training/test_objective.py"]
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=copy, env=environment, capture_output=True).returncode == 0
    finally:
        path.write_text(original)


def main(args: list[str]) -> int:
    chosen = [int(n) for n in args[0].removeprefix("only=").split(",")] if args else range(1, len(MUTATIONS) + 1)
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "lm"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__"))
        for number in chosen:
            what, file, before, after = MUTATIONS[number - 1]
            alive = survives(copy, file, before, after)
            caught += not alive
            print(f"{number:3} {'SURVIVED' if alive else 'caught'}  {file}: {what}", flush=True)
    print(json.dumps({"caught": caught, "total": len(chosen)}))
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
