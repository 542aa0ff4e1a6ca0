"""A key that comes twice in a config: YAML readers take the last one, and nobody sees that the first was lost."""

from __future__ import annotations

from functools import cache
from typing import Any

from lm.errors import ConfigError

_MODES = ("omegaconf+", "yaml")  # of the parsers of PretrainCLI's subcommands; of the one that holds them


@cache
def refuse_repeated_keys() -> None:
    """Let jsonargparse refuse such a config, or value of an option."""
    import yaml
    from jsonargparse import get_loader, set_loader

    read = get_loader("yaml")

    def load(text: str) -> Any:
        _check(text)
        return read(text)

    for mode in _MODES:
        set_loader(mode, load, (yaml.YAMLError,))


def _check(text: str) -> None:
    import yaml

    nodes = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))] if ":" in text else []
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and keys.count(key.value) > 1:
                    raise ConfigError(
                        f"the key '{key.value}' comes twice in one mapping of a config (line"
                        f" {key.start_mark.line + 1}); leave one"
                    )
            nodes += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
