"""Which of a cluster's autoscalers is asked for a service's decisions."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from fulcrum_cli.target.cluster_autoscaler import cluster_decisions
from fulcrum_cli.target.local_autoscaler import Unreachable
from fulcrum_cluster.objects import ObjectApi
from fulcrum_core.errors import Forbidden, StoreUnavailable

DECIDED = [{"action": "hold"}]
AWAY = StoreUnavailable("no endpoints available")


class Autoscalers:
    """A cluster that has an autoscaler in each of these namespaces, with what it answers."""

    def __init__(self, answers: Mapping[str, object], *, sees_all: bool = True) -> None:
        self._answers, self._sees_all = answers, sees_all

    async def list(
        self, _kind: object, *, namespace: str, labels: str
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        assert "component=autoscaler" in labels
        if not namespace and not self._sees_all:
            raise Forbidden("you may not list services")
        found = [
            {"metadata": {"namespace": each, "name": "f-autoscaler"}, "spec": {"ports": [{"name": "http"}]}}
            for each in self._answers
            if namespace in ("", each)
        ]
        return found, "1"

    async def get_path(self, path: str) -> object:
        assert path.endswith("/services/f-autoscaler:http/proxy/decisions?namespace=n&service=chat&limit=5")
        answer = self._answers[path.split("/")[4]]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def decisions(there: Autoscalers) -> Sequence[dict[str, Any]]:
    return await cluster_decisions(cast(ObjectApi, there), "chat", namespace="n", limit=5)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        pytest.param(Autoscalers({"a": [], "fulcrum": DECIDED}), DECIDED, id="the one that decides"),
        pytest.param(
            Autoscalers({"a": [{"action": "flip"}], "n": DECIDED}),
            DECIDED,
            id="its namespace's before others",
        ),
        pytest.param(Autoscalers({"a": AWAY, "b": DECIDED}), DECIDED, id="another one may be away"),
        pytest.param(
            Autoscalers({"n": DECIDED}, sees_all=False), DECIDED, id="somebody who sees one namespace"
        ),
        pytest.param(Autoscalers({"a": [], "n": []}), [], id="nobody has decided yet"),
    ],
)
async def test_the_autoscaler_that_decides_on_a_service_is_asked(
    there: Autoscalers, expected: list[dict[str, Any]]
) -> None:
    assert list(await decisions(there)) == expected


@pytest.mark.parametrize(
    ("there", "words"),
    [
        pytest.param(Autoscalers({}), "no Service with the labels", id="there is none"),
        pytest.param(
            Autoscalers({"a": [], "n": AWAY}), "does not answer through", id="it may be the silent one"
        ),
        pytest.param(Autoscalers({"n": {}}), "does not answer with a list", id="another program"),
    ],
)
async def test_where_nobody_can_be_asked_that_is_said(there: Autoscalers, words: str) -> None:
    with pytest.raises(Unreachable, match=words):
        await decisions(there)
