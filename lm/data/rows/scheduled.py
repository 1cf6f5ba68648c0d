"""The base of objectives whose inputs may be the model's own."""

from pydantic import Field

from lm.data.rows.base import LikelihoodConfig


class ScheduledSamplingConfig(LikelihoodConfig):
    """Objectives whose inputs may be the model's own."""

    scheduled_sampling: float = Field(0.0, ge=0, le=1)
    """Part of the decoder's inputs that the model itself draws at the last step, growing evenly from none at the first: scheduled
    sampling (Bengio et al. 2015, arXiv:1506.03099). It costs another forward."""

    def why_not_context_parallel(self) -> str | None:
        if not self.scheduled_sampling:
            return super().why_not_context_parallel()
        return "objective.scheduled_sampling takes inputs from the place before, which may be of another rank. Set it to 0"
