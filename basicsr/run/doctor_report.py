"""Report the findings of ``basicsr doctor``: table, JSON, HTML page with pictures, name list."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from basicsr.utils.forensics import as_bytes, centre, repeated
from basicsr.utils.img_util import cv2, imfrombytes
from basicsr.utils.misc import atomic_path
from basicsr.utils.text import printable

from .doctor import ImageSet
from .doctor_checks import KINDS, UNKNOWN, Finding, Kind

_NAMED = 3  # images of each kind in the table
_PICTURED = 12  # images of each kind on the page
_PICTURE = 240  # longest side of a picture, in pixels


class Report(NamedTuple):
    """The results of an examination.

    Attributes:
        sets: The sets, with their findings.
        left_out: Names of sets that cannot be examined.
        losses: Losses of the first step; None if it was not made.
        error: Why the first step failed; empty if it did not.
    """

    sets: Sequence[ImageSet]
    left_out: Sequence[str] = ()
    losses: Mapping[str, float] | None = None
    error: str = ''

    def findings(self, kind: str) -> list[tuple[ImageSet, Finding]]:
        """All findings of a kind, the worst first."""
        found = [(images, f) for images in self.sets for f in images.findings if f.kind == kind]
        return sorted(found, key=lambda item: -item[1].value)

    @property
    def can_start(self) -> bool:
        """Whether training can start."""
        fatal = any(images.is_fatal(f) for images in self.sets for f in images.findings)
        return not (self.error or fatal)

    @property
    def warnings(self) -> int:
        """Number of findings that do not keep training from starting."""
        return sum(not images.is_fatal(f) for images in self.sets for f in images.findings)


# terminal


def table(report: Report) -> str:
    """The sets, the findings by kind with the worst of each, and whether training can start."""
    lines = ['']
    lines += [f'{images.name}: {facts(images)}' for images in report.sets]
    lines += [f'{name}: not looked through, a dataset of its own kind' for name in report.left_out]
    lines.append('')
    clean = []
    for kind, about in _kinds_looked_for(report):
        if found := report.findings(kind):
            level = 'error' if any(images.is_fatal(f) for images, f in found) else 'warning'
            lines.append(f'{level:<8} {about.title:<14}{len(found):>7}  {_line(*found[0])}')
            lines += [f'{"":>32}{_line(*item)}' for item in found[1:_NAMED]]
        else:
            clean.append(about.title)
    lines += [f'not found: {", ".join(clean)}'] if clean else []
    return printable('\n'.join([*lines, '', *verdict(report), '']))


def _kinds_looked_for(report: Report) -> Iterator[tuple[str, Kind]]:
    """The kinds of findings that these sets can have."""
    has_pairs = any(len(images.roots) > 1 for images in report.sets)
    is_cut = any(images.demands.gt_size for images in report.sets)
    has_validation = any(not images.demands.is_training for images in report.sets)
    needed = dict.fromkeys(('wrong_size', 'unlike', 'shifted', 'other_kernel'), has_pairs)
    needed |= {'too_small': is_cut, 'leaked': has_validation}
    return ((kind, about) for kind, about in KINDS.items() if needed.get(kind, True))


def _line(images: ImageSet, finding: Finding) -> str:
    return f'{images.name}/{images.name_of(finding.path)}: {finding.text}'


def facts(images: ImageSet) -> str:
    """A summary of a set: size, kernels, JPEG qualities."""
    count, is_paired = len(images.paths), len(images.roots) > 1
    parts = [f'{count} {"pair" if is_paired else "image"}{"s" * (count != 1)}']
    if images.kernels:
        made = ', '.join(f'{name} ({n})' for name, n in images.kernels.most_common())
        parts.append(f'LQ made by {made}'.replace(UNKNOWN, 'an unknown kernel'))
    if images.qualities:
        number, lowest = len(images.qualities), min(images.qualities)
        parts.append(f'{number} of GT were JPEG files once, of quality {lowest:.0f} and more')
    return '; '.join(parts)


def verdict(report: Report) -> Iterator[str]:
    """Whether the first step was made, and whether training can start."""
    if report.error:
        yield f'First step: {report.error}'
    elif report.losses is not None:
        losses = ', '.join(f'{name} {value:.4g}' for name, value in report.losses.items())
        yield f'First step: made ({losses})' if losses else 'First step: made'
    warned = f'{report.warnings} warning{"s" * (report.warnings != 1)}'
    if report.can_start and report.losses is None:
        yield f'Nothing was found that keeps training from starting; {warned}.'
    else:
        yield f'Training {"can" if report.can_start else "cannot"} start; {warned}.'


# files


def write_json(report: Report, file: str) -> None:
    """Write everything that was found."""
    content = {
        'can_start': report.can_start,
        'warnings': report.warnings,
        'first_step': {'error': report.error, 'losses': report.losses},
        'left_out': list(report.left_out),
        'sets': [_as_dict(images) for images in report.sets],
    }
    _write(file, json.dumps(content, indent=2, ensure_ascii=False) + '\n')


def _as_dict(images: ImageSet) -> dict[str, Any]:
    findings = [
        {
            'kind': finding.kind,
            'error': images.is_fatal(finding),
            'name': images.name_of(finding.path),
            'path': finding.path,
            'value': round(finding.value, 4),
            'text': finding.text,
        }
        for finding in images.findings
    ]
    return {
        'name': images.name,
        'images': len(images.paths),
        'kernels': dict(images.kernels),
        'jpeg_qualities': [round(quality) for quality in images.qualities],
        'findings': findings,
    }


def write_exclusion_list(report: Report, file: str) -> int:
    """Write the names of harmful training images; returns how many there are."""
    names = [n for images in report.sets if images.demands.is_training for n in images.excluded()]
    _write(file, ''.join(f'{name}\n' for name in dict.fromkeys(names)))
    return len(set(names))


def _write(file: str, text: str) -> None:
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(Path(file)) as temporary:
        temporary.write_text(text, encoding='utf-8', errors='backslashreplace')


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>basicsr doctor</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1240px;
  padding: 0 1rem; color: #222; background: #fff }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .2rem }}
table {{ border-collapse: collapse }} td, th {{ text-align: left; padding: .2rem 1rem .2rem 0 }}
td.number {{ text-align: right }}
.error {{ color: #b00020 }} .warning {{ color: #8a5a00 }} .good {{ color: #1b6e33 }}
.sheet {{ display: flex; flex-wrap: wrap; gap: 1rem; margin-top: .6rem }}
figure {{ margin: 0; padding: .5rem; border: 1px solid #ddd; border-radius: 6px; max-width: 520px }}
.pictures {{ display: flex; gap: .4rem; align-items: flex-end }}
.pictures div {{ font-size: .75rem; color: #666 }}
img {{ display: block; max-width: 240px; background: #eee }}
figcaption {{ font-size: .85rem; overflow-wrap: anywhere; margin-top: .3rem }}
</style></head><body>
<h1>basicsr doctor</h1>
{verdict}
<h2>Sets</h2>
<table>{sets}</table>
<h2>Findings</h2>
<table><tr><th>finding</th><th>images</th><th>meaning</th></tr>{summary}</table>
{sheets}
</body></html>
"""


def write_html(report: Report, file: str) -> None:
    """Write a page with the worst images of each kind of finding, as one self-contained file."""
    colour = 'good' if report.can_start else 'error'
    named = [(images.name, facts(images)) for images in report.sets]
    named += [(name, 'not looked through') for name in report.left_out]
    kinds = [(kind, report.findings(kind)) for kind in KINDS if report.findings(kind)]
    page = _PAGE.format(
        verdict=''.join(f'<p class="{colour}">{_text(line)}</p>' for line in verdict(report)),
        sets=''.join(f'<tr><th>{_text(n)}</th><td>{_text(about)}</td></tr>' for n, about in named),
        summary=''.join(_summary(*item) for item in kinds) or '<tr><td>none</td></tr>',
        sheets=''.join(_sheet(*item) for item in kinds),
    )
    _write(file, page)


def _text(text: str) -> str:
    return escape(printable(text))


def _summary(kind: str, found: list[tuple[ImageSet, Finding]]) -> str:
    level = 'error' if any(images.is_fatal(f) for images, f in found) else 'warning'
    title, meaning = KINDS[kind].title, KINDS[kind].meaning
    return (
        f'<tr><td class="{level}">{title}</td><td class="number">{len(found)}</td>'
        f'<td>{_text(meaning)}</td></tr>'
    )


def _sheet(kind: str, found: list[tuple[ImageSet, Finding]]) -> str:
    figures = ''.join(_figure(*item) for item in found[:_PICTURED])
    more = f', the worst {_PICTURED}' if len(found) > _PICTURED else ''
    title = f'<h2>{KINDS[kind].title}: {len(found)}{more}</h2>'
    return f'{title}<div class="sheet">{figures}</div>'


def _figure(images: ImageSet, finding: Finding) -> str:
    pictures = ''
    for key, path in finding.images.items():
        label = f'<div>{_LABELS[key]}</div>' if len(finding.images) > 1 else ''
        source = _picture(images, key, path, as_detail=finding.kind in _IN_DETAIL)
        pictures += f'<div><img alt="" src="{source}">{label}</div>' if source else ''
    caption = _text(_line(images, finding))
    return (
        f'<figure><div class="pictures">{pictures}</div><figcaption>{caption}</figcaption></figure>'
    )


_LABELS = {'gt': 'GT', 'lq': 'LQ', 'other': 'the other one'}
_IN_DETAIL = ('jpeg', 'upscaled')  # defects that vanish when an image is reduced


def _picture(images: ImageSet, key: str, path: str, as_detail: bool) -> str:
    """Data URL of a small copy, or of the enlarged centre; empty if the file is unreadable."""
    try:
        content = images.read(path, 'lq' if key == 'lq' or 'gt' not in images.roots else 'gt')
        img = as_bytes(imfrombytes(bytes(content or b'')))
    except (OSError, ValueError):
        return ''
    if as_detail:
        img = repeated(centre(img, _PICTURE // 2), 2)
    factor = _PICTURE / max(img.shape[:2])
    width, height = (max(round(length * factor), 1) for length in (img.shape[1], img.shape[0]))
    how = cv2.INTER_AREA if factor < 1 else cv2.INTER_NEAREST
    img = cv2.resize(img, (width, height), interpolation=how)
    kind = 'png' if as_detail else 'jpeg'  # JPEG would add blocks of its own to details
    data = base64.b64encode(cv2.imencode(f'.{kind}', img)[1])
    return f'data:image/{kind};base64,{data.decode()}'
