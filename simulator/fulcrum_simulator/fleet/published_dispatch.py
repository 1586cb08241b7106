"""Dispatch of published systems, to compare with: round robin, and that of xLLM. Only in the simulator.

`routing.routed_requests` carries out the choices. `docs/simulate.md` describes both.
"""

from collections.abc import Sequence

from fulcrum_core.values import Role, Slo
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.fleet.flip import SimulatedFlip
from fulcrum_simulator.fleet.routed_instance import RoutedFleet


class RoundRobin:
    """Each role's instances in turn, whatever their work. Implements `RouteDispatch`."""

    def __init__(self, fleet: RoutedFleet) -> None:
        self._fleet = fleet
        self._number = 0

    def choose(
        self, _tokens: int, _slo: Slo, _now_s: float, /
    ) -> tuple[LearningInstance, LearningInstance] | None:
        """See `RouteDispatch`."""
        prefill, decode = self._fleet.candidates.prefill, self._fleet.candidates.decode
        if not prefill or not decode:
            return None
        number, self._number = self._number, self._number + 1
        return prefill[number % len(prefill)], decode[number % len(decode)]

    def request_ended(self, instance: LearningInstance, now_s: float, /) -> None:
        """See `RouteDispatch`."""


class Xllm:
    """The dispatch `SLO_AWARE` of xllm-service 0.9.0, with the objectives of the run.

    Implements `RouteDispatch`. T: predicted seconds of the prompts in flight on an instance. I: predicted ITL
    of a decode instance with this request. S_T, S_D: objectives.

    1. The prefill instance is that with the least T, without this prompt.
    2. The decode instance is the first with I ≤ S_D, else that with the least I.
    3. If the least T exceeds S_T, the decode instance with the least I is another one, is below
       S_D·(|D|-1)/|D| and has a smaller T: it computes the prompt, and keeps its role.
    4. If no decode instance has I ≤ S_D, and the mean T of prefill is below S_T·(|P|-1)/|P| or there are
       fewer decode instances: the instance of 1 becomes a decode instance.
    5. A decode instance whose last request has ended becomes a prefill instance.

    Flips are in force at once, without cooldown; each role keeps one instance.
    """

    def __init__(self, fleet: RoutedFleet) -> None:
        self._fleet = fleet
        self.flips: list[SimulatedFlip] = []
        self.refused = 0

    def choose(
        self, tokens: int, slo: Slo, now_s: float, /
    ) -> tuple[LearningInstance, LearningInstance] | None:
        """See `RouteDispatch`."""
        prefill, decode = self._fleet.candidates.prefill, self._fleet.candidates.decode
        if not prefill or not decode:
            return None
        queued_s = [instance.ledger.remaining_s(now_s) for instance in prefill]
        least_s = min(queued_s)
        source = prefill[queued_s.index(least_s)]
        itl_s = [_predict_itl_s(instance, tokens) for instance in decode]
        least_itl_s = min(itl_s)
        fastest = decode[itl_s.index(least_itl_s)]
        chosen = next((i for i, one_s in zip(decode, itl_s, strict=True) if one_s <= slo.tpot_s), fastest)
        if least_itl_s > slo.tpot_s:
            spare = sum(queued_s) / len(prefill) < slo.ttft_s * (len(prefill) - 1) / len(prefill)
            if spare or len(decode) < len(prefill):
                self._flip(source, Role.DECODE, "no decode instance is fast enough", now_s)
        elif (
            least_s > slo.ttft_s
            and chosen is not fastest
            and least_itl_s < slo.tpot_s * (len(decode) - 1) / len(decode)
            and fastest.ledger.remaining_s(now_s) < least_s
        ):
            source = fastest
        return source, chosen

    def request_ended(self, instance: LearningInstance, now_s: float, /) -> None:
        """See `RouteDispatch`."""
        ledger = instance.ledger
        is_idle = not ledger.decode_legs and not ledger.reserved_tokens
        if is_idle and instance.serving and instance.role is Role.DECODE:
            self._flip(instance, Role.PREFILL, "its last request has ended", now_s)

    def _flip(self, instance: LearningInstance, to: Role, reason: str, now_s: float) -> None:
        candidates = self._fleet.candidates
        left: Sequence[LearningInstance] = (
            candidates.prefill if instance.role is Role.PREFILL else candidates.decode
        )
        if len(left) <= 1:
            self.refused += 1
            return
        split = f"{len(candidates.prefill)}P{len(candidates.decode)}D"
        self.flips.append(
            SimulatedFlip(at_s=now_s, instance=instance.name, to=str(to), split=split, reason=reason)
        )
        instance.role = to
        self._fleet.refresh()


def _predict_itl_s(instance: LearningInstance, tokens: int) -> float:
    ledger = instance.ledger
    return instance.decode_model.itl_s(ledger.decode_tokens + ledger.reserved_tokens + tokens)
