"""The project's errors.

FulcrumError
├── InvalidInput            what a user wrote breaks a rule: path, value, rule
└── StoreError              the store refused
    ├── NotFound
    ├── AlreadyExists
    ├── Conflict            the precondition (resourceVersion) no longer holds: read again, decide again
    ├── Gone                a watch cannot resume from there: list again
    ├── Forbidden           this account may not do that: who grants rights has to act
    └── StoreUnavailable    the store did not answer: retry later
"""


class FulcrumError(Exception):
    """Root of the tree; its text is one line that a user can act on."""


class InvalidInput(FulcrumError):
    """A value that a user wrote breaks a rule. The text is one line: path, value, rule."""

    def __init__(self, path: str, value: object, rule: str) -> None:
        super().__init__(f"{path} ({value}) {rule}")
        self.path, self.value, self.rule = path, value, rule


class StoreError(FulcrumError):
    """The store refused a call."""


class NotFound(StoreError):
    """No such object."""


class AlreadyExists(StoreError):
    """An object of that kind and name exists."""


class Conflict(StoreError):
    """The object changed since it was read: read again and decide again."""


class Gone(StoreError):
    """A watch cannot resume from that resourceVersion: list again."""


class Forbidden(StoreError):
    """This account may not do that. The text names account, verb, resource and namespace."""


class StoreUnavailable(StoreError):
    """The store did not answer: retry later, and not before `retry_after_s` if the store said so."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
