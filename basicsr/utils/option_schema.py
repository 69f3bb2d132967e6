"""Base class of the option tables, and the check of names."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
    model_validator,
)

from .errors import UserError

# Names of folders and files that are valid on every system.
_PLAIN_NAME = r'[\w+-][^/\\:*?"<>|\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]{0,199}'
_RESERVED = re.compile(r'(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)  # by Windows
_LONGEST_NAME = 200  # bytes; files of a run add up to 55, and file systems allow 255


def is_plain_name(text: str) -> bool:
    """Whether a name is valid for a folder or file on every system, and stays in its folder."""
    return (
        re.fullmatch(_PLAIN_NAME, text) is not None
        and len(text.encode('utf-8', 'replace')) <= _LONGEST_NAME
        and text[-1] not in '. '
        and not _RESERVED.match(text)
    )


def check_plain_name(text: str) -> str:
    """Return ``text``; raise UserError unless it is a plain name."""
    if not is_plain_name(text):
        raise UserError('must be a plain folder name')
    return text


PlainName = Annotated[str, AfterValidator(check_plain_name)]


def _kinds_in(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is composed of."""
    yield annotation
    for part in get_args(annotation):
        yield from _kinds_in(part)


class Section(BaseModel):
    """A table of options: ``~`` means the default, and unknown keys are kept."""

    model_config = ConfigDict(extra='allow', protected_namespaces=(), allow_inf_nan=False)

    # Optional keys that components read, blank-separated: known for spelling, never filled in.
    also_known: ClassVar[str] = ''
    # Prefixes of keys that end in a name chosen by the user, like network_<name>.
    families: ClassVar[tuple[str, ...]] = ()
    # Whether a component's constructor reads and checks keys unknown here.
    has_component: ClassVar[bool] = False
    # Why keys unknown here are refused; '' lets them pass.
    refusal: ClassVar[str] = ''

    @model_validator(mode='before')
    @classmethod
    def _drop_tildes(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        return {k: v for k, v in section.items() if v is not None or k not in cls.model_fields}

    @field_validator('*', mode='before')
    @classmethod
    def _reject_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = list(_kinds_in(cls.model_fields[info.field_name or ''].annotation))
        if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
            raise UserError('must be a number')
        return value

    @classmethod
    def defaults(cls) -> Self:
        return cls.model_validate({})

    @classmethod
    def known(cls) -> set[str]:
        """All keys that are declared here, without families."""
        return {*cls.model_fields, *cls.also_known.split()}

    @classmethod
    def is_known(cls, key: str) -> bool:
        return key in cls.known() or key.startswith(cls.families)

    @classmethod
    def names_files(cls, key: str) -> bool:
        """Whether a file or folder of the run is named after the key."""
        return False

    def contradictions(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Options that are valid by themselves but cannot be combined: key path and reason."""
        yield from ()

    @classmethod
    def inner(cls, key: str) -> 'type[Section] | None':
        """The table of the section ``key``; None if ``key`` is a value or a component's."""
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        for candidate in (annotation, *getattr(annotation, '__args__', ())):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
        return None
