"""kopf only hands events over: it copies no object, and handles few events in one turn of the event loop."""

from typing import Any

from fulcrum_operator.controller.kopf_feed import WORKERS_MAX, kopf_settings


class UncopyableSpec(dict[str, Any]):
    """A part of an object that fails if it is copied."""

    def __deepcopy__(self, _memo: object) -> None:
        raise AssertionError("an object was copied")


def test_kopf_copies_no_object_to_compare_it_later() -> None:
    settings, body = kopf_settings(), {"metadata": {"name": "chat-0"}, "spec": UncopyableSpec()}
    made: Any = settings.persistence.diffbase_storage.build(body=body)  # type: ignore[arg-type]
    assert settings.persistence.progress_storage.clear(essence=made) == {}


def test_kopf_handles_few_events_of_a_kind_in_one_turn() -> None:
    settings = kopf_settings()
    assert settings.queueing.worker_limit == WORKERS_MAX
