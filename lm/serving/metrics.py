"""Counts and times of the server's work, in the text format of Prometheus 0.0.4."""

import bisect
from collections import Counter

_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)  # seconds


class Histogram:
    """Times in seconds, counted in buckets by upper bound."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(_BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        """Adds one time to its bucket."""
        self.counts[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str) -> list[str]:
        """Returns its samples as lines of text; bucket counts are cumulative."""
        upto = [sum(self.counts[: i + 1]) for i in range(len(self.counts))]
        buckets = [f'{name}_bucket{{le="{bound}"}} {n}' for bound, n in zip([*map(str, _BOUNDS), "+Inf"], upto, strict=True)]
        return [*buckets, f"{name}_sum {self.sum}", f"{name}_count {upto[-1]}"]


class Metrics:
    """Counters since the start. Each is written by one thread."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.cancelled = 0
        self.prompt_tokens = 0
        self.tokens = 0
        self.running = 0  # rows
        self.waiting = 0  # prompts
        self.first_s, self.whole_s = Histogram(), Histogram()

    def text(self) -> str:
        """Returns all metrics in Prometheus's text format."""
        counted = [f'lm_requests_total{{path="{path}",status="{status}"}} {n}' for (path, status), n in sorted(self.requests.items())]
        families = [
            ("lm_requests_total", "counter", "Requests answered.", counted),
            ("lm_requests_cancelled_total", "counter", "Requests whose client left.", [f"lm_requests_cancelled_total {self.cancelled}"]),
            ("lm_prompt_tokens_total", "counter", "Tokens of prompts taken.", [f"lm_prompt_tokens_total {self.prompt_tokens}"]),
            ("lm_generated_tokens_total", "counter", "Tokens drawn.", [f"lm_generated_tokens_total {self.tokens}"]),
            ("lm_rows_running", "gauge", "Samples decoded now.", [f"lm_rows_running {self.running}"]),
            ("lm_prompts_waiting", "gauge", "Prompts not read yet.", [f"lm_prompts_waiting {self.waiting}"]),
            ("lm_first_token_seconds", "histogram", "From a request to its first token.", self.first_s.lines("lm_first_token_seconds")),
            ("lm_request_seconds", "histogram", "From a request to its end.", self.whole_s.lines("lm_request_seconds")),
        ]
        lines = [line for name, kind, says, found in families for line in (f"# HELP {name} {says}", f"# TYPE {name} {kind}", *found)]
        return "\n".join(lines) + "\n"
