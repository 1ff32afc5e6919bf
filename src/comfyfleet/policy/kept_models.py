"""Which models a server keeps beside those of its last run, learned from its reports. Pure.

ComfyUI keeps the models of its last prompt. With `--cache-lru`, it keeps those of earlier prompts too. A run shows this
when it takes models from the cache that the last run did not use, and how far it goes when it has to load them again.
"""

from __future__ import annotations

from typing import NamedTuple

from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.run_times import RunReport
from comfyfleet.policy.scheduling import NO_MODELS, missing

_MAX_SETS = 16


class KeptModels(NamedTuple):
    recent: tuple[ModelSet, ...] = ()
    """The models of the last runs, newest first, each set once."""
    size: int = 1
    """So many of these sets the server keeps, as far as is known."""

    @property
    def loaded(self) -> ModelSet:
        return NO_MODELS.union(*self.recent[: self.size])

    @property
    def goes(self) -> ModelSet | None:
        """What goes first when something is loaded. None: everything."""
        if self.size == 1:
            return None
        if len(self.recent) < self.size:
            return NO_MODELS
        return self.recent[self.size - 1] - NO_MODELS.union(*self.recent[: self.size - 1])

    def while_running(self, models: ModelSet) -> KeptModels:
        others = tuple(each for each in self.recent if each != models)
        return KeptModels((models, *others)[:_MAX_SETS], self.size)

    def after_run(self, models: ModelSet, had_them: bool | None) -> KeptModels:
        """`had_them`: whether the server took the models from its cache. None: unknown."""
        size = self.size
        if had_them is not None and models in self.recent:
            place = self.recent.index(models)
            size = max(size, place + 1) if had_them else max(1, min(size, place))
        return self.while_running(models)._replace(size=size)


def had_models(report: RunReport, models: ModelSet) -> bool | None:
    """Whether a run found all its models in the server's cache. None: its report does not say."""
    result = report.result
    if not result.timings:
        return None
    ran = {timing.node_id for timing in result.timings}
    if any(node in ran for node in report.loaders):
        return False
    cached = (report.loaders[node] for node in result.cached_nodes if node in report.loaders)
    return None if missing(models, NO_MODELS.union(*cached)) else True
