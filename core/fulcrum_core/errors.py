"""Errors that all rooms share.

An error whose text a user sees derives from `FulcrumError`; if only one room raises it, that room defines it.
Errors that a room raises and catches itself, such as `LegFailed` of the router, do not derive from it.

FulcrumError
├── InvalidInput            a user's value breaks a rule: path, value, rule
├── NameTaken               an object of somebody else has a name that is needed
└── StoreError              a call to the store failed
    ├── NotFound
    ├── AlreadyExists
    ├── Conflict            the object changed since it was read: read again, decide again
    ├── Gone                a watch cannot resume from that resourceVersion: list again
    ├── Forbidden           this account lacks the permission
    └── StoreUnavailable    the store did not respond, or cannot serve now: retry later
"""


class FulcrumError(Exception):
    """Root of the tree. The text is one line that a user can act on."""


class InvalidInput(FulcrumError):
    """A user's value breaks a rule. The text is one line: path, value, rule."""

    def __init__(self, path: str, value: object, rule: str) -> None:
        super().__init__(f"{path} ({value}) {rule}")
        self.path, self.value, self.rule = path, value, rule


class NameTaken(FulcrumError):
    """An object of somebody else has a name that is needed. The text names the object and its owner."""


class StoreError(FulcrumError):
    """A call to the store failed."""


class NotFound(StoreError):
    """No such object."""


class NamespaceNotFound(NotFound):
    """The namespace of an object that is written does not exist; the object itself may still be stored."""


class AlreadyExists(StoreError):
    """An object of that kind and name exists."""


class Conflict(StoreError):
    """The object changed since it was read: read again and decide again."""


class Gone(StoreError):
    """A watch cannot resume from that resourceVersion: list again."""


class Forbidden(StoreError):
    """This account lacks a permission. The text names account, verb, resource and namespace."""


class StoreUnavailable(StoreError):
    """The store did not respond, or responded that it cannot serve now.

    Retry later, after `retry_after_s` if the store requested a pause.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.cause = cause or message
        """Cause of the failure without the store's address."""
