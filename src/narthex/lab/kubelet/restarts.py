"""Restarts of containers: whether one restarts, and after which delay.

Follows Kubernetes 1.34: kuberuntime_manager.go (backOffPeriod), kubelet/container/helpers.go (ShouldContainerBeRestarted).
"""

from __future__ import annotations

from narthex.model.backoff import Backoff

_BACKOFF = Backoff(10.0, 300.0)
_STABLE_SECONDS = 600.0
"""Run time after which the delay starts anew."""


def is_restarted(policy: str, exit_code: int) -> bool:
    """Return True if a pod's restartPolicy restarts a container that ended with this code."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


def restarts_counted(restarts: int, ran_seconds: float) -> int:
    """Return the restarts that count for the delay: none after a run of more than 10 minutes."""
    return 0 if ran_seconds > _STABLE_SECONDS else restarts


def back_off(restarts: int) -> float:
    """Return the seconds until a container is restarted: 0 the first time, then 10 s, doubled up to 5 minutes."""
    return _BACKOFF.delay(restarts)
