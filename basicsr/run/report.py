"""The report of one or several runs: everything that their folders tell, in one HTML file.

The page opens without a server or a network: its data are JSON inside it, drawn by its own script.
"""

import glob
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from basicsr.utils.errors import UserError
from basicsr.utils.figures import smoothed
from basicsr.utils.img_util import cv2
from basicsr.utils.json_lines import read_rows
from basicsr.utils.misc import atomic_path
from basicsr.utils.text import printable

from .report_record import picture
from .report_statistics import compare

_MOST_POINTS = 1000  # of a curve; scores are never thinned
_MOST_INCIDENTS = 200
_HARDEST = 8  # in the table of a set
_PICTURED = 3  # of them, of a test
_LOG_LINE = re.compile(r'([\d-]{10} [\d:]{8}),\d+ (\w+): (.*)')
# Options that say where a run is, not what it is.
_PLACES = re.compile(
    r'(name|option_file|root_path|rank|world_size|dist|is_train|auto_resume|force_yml'
    r'|path\.(experiments_root|results_root|models|training_states|log|visualization))(\.|$)'
)


def write_report(folders: Sequence[str | Path], file: str | Path) -> None:
    """Write the report of runs, in the order given; the others are compared with the first.

    Args:
        folders: Of trainings (``experiments/<name>``) or of tests (``results/<name>``).
        file: The page.
    """
    runs = [_read_run(Path(folder)) for folder in folders]
    content = {
        'made': time.strftime('%Y-%m-%d %H:%M'),
        'compared': [row for run in runs[1:] for row in compare(runs[0], run)],
        'options': _options_table([run.pop('options') for run in runs]),
        'runs': runs,
    }
    for run in runs:
        run.pop('images')  # what the page shows of them is under 'hardest'
    text = json.dumps(_finite(content), ensure_ascii=False).replace('<', r'\u003c')
    page = Path(__file__).with_suffix('.html').read_text(encoding='utf-8')
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file, durable=False) as temporary:
        temporary.write_text(page.replace('{{data}}', text), 'utf-8', errors='backslashreplace')


def find_runs(names: Sequence[str], root: Path) -> list[Path]:
    """The folders of runs given by path or by name; without any, the newest training.

    Raises:
        ValueError: One is not the folder of a run.
    """
    if not names:
        found = sorted(root.glob('experiments/*/metrics.jsonl'), key=lambda f: f.stat().st_mtime)
        if not found:
            raise UserError(f'there is no run in {root / "experiments"}: name the folder of one.')
        return [found[-1].parent]
    return [_find_run(name, root) for name in names]


def _find_run(name: str, root: Path) -> Path:
    places = [root / name, root / 'experiments' / name, root / 'results' / name]
    known = ('metrics.jsonl', 'results.json', 'report.json', 'scores.jsonl', '*.log')
    for folder in places:
        if folder.is_dir() and any(any(folder.glob(pattern)) for pattern in known):
            return folder
    raise UserError(
        f'{name} is not a run: a folder in experiments/ with metrics.jsonl, or one in results/ '
        'with results.json is needed.'
    )


def _read_run(folder: Path) -> dict[str, Any]:
    """All of a run that the page shows; what cannot be read becomes a note."""
    notes: list[str] = []
    recorded = _read(folder / 'report.json', notes, _json_dict) or {}
    tested = _read(folder / 'results.json', notes, _json_dict) or {}
    is_test = bool(tested) and not (folder / 'metrics.jsonl').exists()
    rows = [] if is_test else _read(folder / 'metrics.jsonl', notes, _rows, is_needed=True) or []
    scores = [] if is_test else _read(folder / 'scores.jsonl', notes, _rows) or []
    logs = sorted(folder.glob('*.log'), key=lambda log: log.stat().st_mtime)
    texts = [_read(log, notes, lambda f: f.read_text('utf-8', errors='replace')) for log in logs]
    options = recorded.get('options') or {}
    images = _images_of_test(tested) if is_test else _images_of_training(scores)
    metric_options = tested.get('metric_options') or (options.get('val') or {}).get('metrics') or {}
    baselines = recorded.get('baselines') or {}
    sets = {name: result.get('metrics') or {} for name, result in _sets(tested).items()}
    about_test = {'network_g': tested.get('network'), 'weights': tested.get('weights')}
    run = {
        'name': folder.resolve().name,
        'folder': printable(str(folder)),
        'iter': max((row['iter'] for row in rows), default=None),
        'total': (options.get('train') or {}).get('total_iter'),
        'rates': recorded.get('rates') or [],
        'curves': _curves(rows),
        'figures': _figures(rows, sets, metric_options, baselines),
        'images': images,
        'metric_options': metric_options,
        'hardest': _hardest(images, metric_options),
        'pictures': recorded.get('pictures') or {},
        'hard_pictures': recorded.get('hardest') or {},
        'options': options or (about_test if is_test else {}),
        'environment': _environment('\n'.join(filter(None, texts))),
        'incidents': list(_incidents(filter(None, texts)))[-_MOST_INCIDENTS:],
        'notes': notes,
    }
    for name, hardest in run['hardest'].items() if is_test else ():
        written = folder / 'visualization' / name
        pictures = [_read(written, notes, _picture_of(image['name'])) for image in hardest]
        run['hard_pictures'][name] = [p for p in pictures if p][:_PICTURED]
    run['incidents'] += _unreadable_images(folder, notes)
    if not scores and not is_test:
        notes.append('scores.jsonl is not there: no scores of single images, no comparison.')
    return run


def _read(file: Path, notes: list[str], read: Callable, is_needed: bool = False) -> Any:
    """What is in a file; None, with a note, if it cannot be read."""
    try:
        return read(file)
    except FileNotFoundError:
        if is_needed:
            notes.append(f'{file.name} is not there.')
    except (OSError, ValueError, RecursionError) as error:
        notes.append(printable(f'{file.name} cannot be read: {error}'))
    return None


def _json_dict(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise ValueError('it is not an object.')
    return content


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = read_rows(file, 'iter')
    lines = sum(bool(line.strip()) for line in file.read_bytes().split(b'\n'))
    if lines and not rows:
        raise ValueError('none of its lines is a row.')
    return rows


def _sets(tested: Mapping[str, Any]) -> dict[str, Any]:
    return tested.get('sets') or {}


# curves and figures


def _curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list]]:
    """By tag: iterations 'x', values 'y', and of losses the smoothed values 's'."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        for tag, value in row.items():
            if tag != 'iter' and isinstance(value, int | float):
                points[tag].append((row['iter'], value))
    curves = {}
    for tag, found in points.items():
        x, y = zip(*found, strict=True)
        curve = {'x': list(x), 'y': list(y)}
        if tag.startswith('losses/') and len(y) > 20:
            curve['s'] = [float(f'{value:.6g}') for value in smoothed(np.array(y))]
        if not tag.startswith('metrics/'):
            step = -(-len(x) // _MOST_POINTS)
            keep = [*range(0, len(x) - 1, step), len(x) - 1]
            curve = {key: [values[i] for i in keep] for key, values in curve.items()}
        curves[tag] = curve
    return curves


def _figures(
    rows: Sequence[Mapping[str, Any]],
    tested: Mapping[str, Mapping[str, float | None]],
    options: Mapping[str, Any],
    baselines: Mapping[str, float],
) -> dict[str, dict[str, Any]]:
    """By 'set/metric': the last and the best score, their iterations, and the baseline's."""
    scores: dict[str, list[tuple[int | None, float]]] = defaultdict(list)
    for row in rows:
        for tag, value in row.items():
            if tag.startswith('metrics/') and isinstance(value, int | float):
                scores[tag.removeprefix('metrics/')].append((row['iter'], value))
    for name, metrics in tested.items():
        for metric, value in metrics.items():
            if value is not None:
                scores[f'{name}/{metric}'].append((None, value))
    figures = {}
    for key, found in scores.items():
        is_lower = better(options, key.rpartition('/')[2]) == 'lower'
        best = min(found, key=lambda item: item[1] if is_lower else -item[1])
        figures[key] = {
            'last': found[-1][1],
            'last_iter': found[-1][0],
            'best': best[1],
            'best_iter': best[0],
            'better': 'lower' if is_lower else 'higher',
            'baseline': baselines.get(f'metrics/{key}'),
        }
    return figures


def better(options: Mapping[str, Any], metric: str) -> str:
    """Whether the metric of a run is better 'higher' or 'lower'."""
    given = options.get(metric)
    return given.get('better', 'higher') if isinstance(given, dict) else 'higher'


# images


def _images_of_training(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By set: the scores of its images at the last validation."""
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        if isinstance(row.get('images'), dict) and 'set' in row:
            last[row['set']] = {key: row.get(key) for key in ('iter', 'grouped', 'images')}
    return last


def _images_of_test(tested: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {'iter': None, 'grouped': False, 'images': result.get('images') or {}}
        for name, result in _sets(tested).items()
    }


def _hardest(images: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, list]:
    """By set: names and scores of the images with the worst scores by the first metric."""
    hardest = {}
    for name, scored in images.items():
        metric = next(iter(next(iter(scored['images'].values()), {})), None)
        sign = -1 if better(options, str(metric)) == 'lower' else 1
        given = [(i, s) for i, s in scored['images'].items() if s.get(metric) is not None]
        given.sort(key=lambda item: sign * item[1][metric])
        hardest[name] = [{'name': printable(i), 'scores': s} for i, s in given[:_HARDEST]]
    return hardest


def _picture_of(name: str) -> Callable[[Path], dict[str, Any] | None]:
    """A function from the folder of a test's images to the picture of one that was written."""

    def read(folder: Path) -> dict[str, Any] | None:
        for file in sorted(folder.glob(f'{glob.escape(name)}_*.png')):
            image = cv2.imdecode(np.frombuffer(file.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
            return None if image is None else picture({'name': name, 'result': image})
        return None

    return read


# options, environment, incidents


def _options_table(options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each option with its value in every run, and whether they differ."""
    flat = [dict(_flat(opt)) for opt in options]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [
        {'key': key, 'values': values, 'differs': len(set(values)) > 1}
        for key in keys
        if not _PLACES.match(key)
        for values in [[opt.get(key) for opt in flat]]
    ]


def _flat(value: Any, key: str = '') -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for inner, item in value.items():
            yield from _flat(item, f'{key}.{inner}' if key else str(inner))
    else:
        yield key, printable('~' if value is None else json.dumps(value, ensure_ascii=False))


def _environment(log: str) -> dict[str, str]:
    """The versions that the newest log has at its start."""
    found = re.findall(r'Version Information:((?:\n\t[^\n]*)*)', log)
    pairs = (line.partition(': ') for line in (found[-1] if found else '').split('\n\t')[1:])
    return {key: printable(value) for key, _, value in pairs}


def _incidents(logs: Iterator[str] | Any) -> Iterator[dict[str, str]]:
    """Warnings, errors and resumes in the text logs, one line each."""
    for text in logs:
        for found in map(_LOG_LINE.match, text.splitlines()):
            if found and (found[2] in ('WARNING', 'ERROR', 'CRITICAL') or 'Resuming' in found[3]):
                level, said = found[2].lower(), printable(found[3])
                yield {'time': found[1], 'level': level, 'text': said[:400]}


def _unreadable_images(folder: Path, notes: list[str]) -> list[dict[str, str]]:
    """One entry for the images in ``skipped.jsonl``, one for the batches in ``incidents/``."""
    file, found = folder / 'skipped.jsonl', []
    rows = _read(file, notes, lambda f: read_rows(f, 'sample')) or []
    if rows:
        found.append(f'{len(rows)} unreadable images were replaced by others: see {file.name}')
    if batches := sorted(folder.glob('incidents/*.pt'), key=lambda f: int(f.stem.split('_')[0])):
        iterations = ', '.join(dict.fromkeys(batch.stem.split('_')[0] for batch in batches[:10]))
        found.append(
            f'{len(batches)} batches with non-finite values are in incidents/, for basicsr replay: '
            f'iterations {iterations}{", …" if len(batches) > 10 else ""}'
        )
    return [{'time': '', 'level': 'warning', 'text': text} for text in found]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
