"""The settings before validation: a deployment file's tree, what is set over it, and who set what.

A wrong value is laid to whoever set it: the file, an environment variable, the command line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.addresses import mask_source

ENV_PREFIX = "FRAMECHAT__"
_SECRET_KEY = re.compile(r"password|secret|api_key$|token$", re.IGNORECASE)
_SHOWN_CHARS = 200
_HIDDEN = " = ***"


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line a setting, each naming key, value and mend."""


def _plain(annotation: Any) -> Any:
    """An annotation without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _plain(kinds[0]) if len(kinds) == 1 else None
    return annotation


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_free(kind: Any) -> bool:
    """Whether it is a mapping with keys of the user's own, such as `server.env`; the classes' names are ours."""
    return get_origin(kind) is dict and not _is_section(_plain(get_args(kind)[-1]))


def _kind_below(kind: Any, key: int | str) -> Any:
    """The type of the item `key` of a `kind`; None where there is no such item, or nobody can say."""
    if _is_section(kind):
        field = kind.model_fields.get(str(key))
        return None if field is None else _plain(field.annotation)
    return _plain(get_args(kind)[-1]) if get_origin(kind) in (list, dict) else None


class Settings:
    """The tree of a deployment file, with overrides laid over it.

    Args:
        tree: What the file holds; changed by `override`.
        where: How an error names the file.
        root: What the tree is validated as.
    """

    def __init__(self, tree: dict[str, Any], where: str, root: type[BaseModel]) -> None:
        self.tree = tree
        self._where = where
        self._root = root
        self._origins: dict[tuple[str, ...], str] = {}

    def override_from_environment(self, name: str, raw: str) -> None:
        """Set what a `FRAMECHAT__SECTION__KEY` variable names; keys below a free mapping keep their case.

        Raises:
            ConfigError: There is no such place, or the value is not YAML.
        """
        keys: list[str] = []
        kind: Any = self._root
        free = False
        for part in name.removeprefix(ENV_PREFIX).split("__"):
            free = free or _is_free(kind)
            keys.append(part if free else part.lower())
            kind = _kind_below(kind, keys[-1])
        self.override(keys, raw, name)

    def override(self, keys: Sequence[str], raw: str, origin: str) -> None:
        """Set one value; a number steps into a list (`cameras.0.source`), the number after its last item adds one.

        Raises:
            ConfigError: There is no such place, or the value is not YAML.
        """
        dotted = ".".join(keys)
        *parents, leaf = keys
        # What was set below is gone.
        self._origins = {old: who for old, who in self._origins.items() if old[: len(keys)] != tuple(keys)}
        self._origins[tuple(keys)] = origin
        try:
            node: Any = self.tree
            for key, below in zip(parents, keys[1:], strict=True):
                node = _step(node, key, [] if below.isdecimal() else {})
            value = self._parsed(keys, raw)
            if isinstance(node, list):
                _step(node, leaf, value)
                node[int(leaf)] = value
            else:
                node[leaf] = value
        except yaml.YAMLError as error:
            message = f"{dotted}{self._shown(keys, raw)}: is not a YAML value"
            raise ConfigError(f"{origin}: {message}") from error
        except ConfigError as error:
            raise ConfigError(f"{origin}: {dotted}: {error}") from error

    def explain(self, error: ValidationError) -> str:
        """One line a problem: who set it, the key, the value where that is no secret, and what is allowed."""
        lines = []
        for item in error.errors():
            keys = [str(part) for part in item["loc"]]
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = self._unknown_key(keys)
            elif item["type"] == "missing":
                message = "is missing, allowed: a value"
            elif "allowed" not in message:
                message = f"allowed: {message.removeprefix('Input should be ')}"
            key = ".".join(keys) or "(whole file)"
            lines.append(f"{self._blamed(keys, message)}: {key}{self._shown(keys, item['input'])}: {message}")
        return "\n".join(lines)

    def _parsed(self, keys: Sequence[str], raw: str) -> Any:
        """The value as YAML; text of a free mapping as it is, for a token may look like a number or a comment."""
        is_text = _is_free(self._kind(keys[:-1])) and self._kind(keys) is str
        if is_text and raw[:1] not in ("'", '"'):
            return raw
        return yaml.safe_load(raw)

    def _kind(self, keys: Sequence[str]) -> Any:
        kind: Any = self._root
        for key in keys:
            kind = _kind_below(kind, key)
        return kind

    def _origin(self, keys: Sequence[str]) -> str | None:
        """Who set this key, or a section around it; None: the file."""
        found = (self._origins.get(tuple(keys[:length])) for length in range(len(keys), 0, -1))
        return next((origin for origin in found if origin is not None), None)

    def _blamed(self, keys: Sequence[str], message: str) -> str:
        """Whom to name: who set the key; of a section the file, and who set a key of it that the message names."""
        origin = self._origin(keys)
        if origin is not None:
            return origin
        among = [
            who
            for place, who in self._origins.items()
            if place[: len(keys)] == tuple(keys) and re.search(rf"\b{re.escape(place[-1])}\b", message)
        ]
        return " with ".join([self._where, *([", ".join(dict.fromkeys(among))] if among else [])])

    def _shown(self, keys: Sequence[str], given: object) -> str:
        """The value that was given, without what may be secret; nothing for whole sections.

        From the environment, where secrets live, only the values of settings that we know are shown.
        """
        if isinstance(given, dict | list | BaseModel):
            return ""
        if _SECRET_KEY.search(".".join(keys)) or "env" in keys:
            return _HIDDEN
        if (self._origin(keys) or "").startswith(ENV_PREFIX) and not self._is_known_value(keys):
            return _HIDDEN
        text = repr(mask_source(given) if isinstance(given, str) else given)
        return f" = {text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + '...'}"

    def _is_known_value(self, keys: Sequence[str]) -> bool:
        kind = self._kind(keys)
        is_value = kind is not None and not _is_section(kind) and get_origin(kind) not in (list, dict)
        return is_value and _is_section(self._kind(keys[:-1]))

    def _unknown_key(self, keys: Sequence[str]) -> str:
        """What to say of a key that does not exist: the nearest one, or all."""
        section = self._kind(keys[:-1])
        allowed = sorted(section.model_fields) if _is_section(section) else []
        near = get_close_matches(keys[-1], allowed, n=1)
        hint = "; secrets come from the environment only" if _SECRET_KEY.search(keys[-1]) else ""
        if near:
            return f"unknown key, allowed: {near[0]}?{hint}"
        return f"unknown key, allowed: {', '.join(allowed)}{hint}" if allowed else f"unknown key{hint}"


def _step(node: Any, key: str, fresh: object) -> Any:
    """The item `key` of a section or list, made from `fresh` where it is missing.

    Raises:
        ConfigError: There is no such place.
    """
    if isinstance(node, list):
        if not key.isdecimal() or int(key) > len(node):
            raise ConfigError(f"{key} is no item of a list of {len(node)}, allowed: 0 to {len(node)}")
        if int(key) == len(node):
            node.append(fresh)
        return node[int(key)]
    if node.get(key) is None:
        node[key] = fresh
    child = node[key]
    if not isinstance(child, dict | list) and isinstance(fresh, dict | list):
        raise ConfigError(f"{key} is not a section")
    return child
