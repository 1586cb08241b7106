"""The loader of users' YAML: manifests and engine profiles are read as kubectl reads YAML.

Times stay text, and a duplicate key is an error, where PyYAML would take the last one without a word.
"""

from typing import Any

import yaml

_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps times as text and refuses duplicate keys."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class declares it so
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; a duplicate key is a `ConstructorError` at its second place."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is written twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_documents(text: str) -> list[Any]:
    """Return all documents of a YAML text; raise `yaml.YAMLError` if the text is not YAML."""
    try:
        return list(yaml.load_all(text, _Loader))
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="is nested too deeply") from None
    except (ValueError, LookupError, AttributeError, TypeError):  # PyYAML lets those of its types through
        problem = "has a value that is not of its type, or a number of thousands of digits"
        raise yaml.MarkedYAMLError(problem=problem) from None
