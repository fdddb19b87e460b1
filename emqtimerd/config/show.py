"""Settings for reading: as the TOML file that would give them, and as a JSON Schema."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticUndefined, core_schema

from emqtimerd.config.load import Config
from emqtimerd.config.problems import Path, dotted, key_text, quoted
from emqtimerd.config.settings import (
    PromoteOverride,
    PromoteSettings,
    Section,
    Settings,
    StalledCheckOverride,
    StalledCheckSettings,
)
from emqtimerd.config.shape import fields, written
from emqtimerd.config.values import TextForm


def show(config: Config) -> str:
    """The effective settings as TOML, each with its origin; secrets are masked.

    Loaded again it gives the same settings, but for a masked password.
    """
    lines: list[str] = []
    open_table: Path = ()
    for path, value in _values_before_tables(config.settings):
        *table, key = path
        if tuple(table) != open_table:
            open_table = tuple(table)
            lines += ["", _header(open_table)]
        lines.append(f"{key_text(str(key))} = {_toml(value)}  # {config.origins[dotted(path)]}")
    return "\n".join(lines) + "\n"


def _values_before_tables(settings: Settings) -> list[tuple[Path, object]]:
    """In TOML a table ends only where the next begins, so a table's own values come first."""
    tables: dict[Path, list[tuple[Path, object]]] = {}
    for path, value in written(settings):
        for depth in range(len(path)):
            tables.setdefault(path[:depth], [])
        tables[path[:-1]].append((path, value))
    return [item for items in tables.values() for item in items]


def _header(table: Path) -> str:
    names = ".".join(key_text(part) for part in table if isinstance(part, str))
    return f"[[{names}]]" if isinstance(table[-1], int) else f"[{names}]"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return quoted(value) if isinstance(value, str) else repr(value)


class _Schema(GenerateJsonSchema):
    """TOML has no null: a setting that may be left out is not one that may be null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Defaults are written afterwards, as a file would write them."""
        return self.generate_inner(schema["schema"])


def schema() -> dict[str, Any]:
    """The JSON Schema of the configuration file."""
    document = Settings.model_json_schema(schema_generator=_Schema)
    tables = {table.__name__: table for table in _tables(Settings)}
    for name, table in tables.items():
        properties = document["$defs"][name]["properties"] if name in document["$defs"] else None
        _write_defaults(properties or document["properties"], table)
    for general, override in (
        (PromoteSettings, PromoteOverride),
        (StalledCheckSettings, StalledCheckOverride),
    ):
        described = document["$defs"][general.__name__]["properties"]
        for key, setting in document["$defs"][override.__name__]["properties"].items():
            setting["description"] = described[key]["description"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | document


def _tables(table: type[Section]) -> list[type[Section]]:
    inner = [kind.table or (kind.item and kind.item.table) for kind in fields(table).values()]
    return [table, *(found for each in inner if each for found in _tables(each))]


def _write_defaults(properties: dict[str, Any], table: type[Section]) -> None:
    for (key, kind), field in zip(fields(table).items(), table.model_fields.values(), strict=True):
        default = field.get_default(call_default_factory=False)
        # A table's default is that of its settings; an override and a table of tables have none.
        if default is None or default is PydanticUndefined or isinstance(default, Section):
            continue
        if not field.is_required():
            form = kind.note(TextForm)
            properties[key]["default"] = form.write(default) if form else default
