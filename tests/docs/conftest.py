import pytest
from guide import blocks, merge

from basicsr.utils import yaml_load


@pytest.fixture
def page(repository):
    """The text of a Markdown file, or of the part below one of its headings."""

    def read(name, heading=None):
        text = (repository / name).read_text(encoding='utf-8')
        return text.split(f'\n## {heading}\n')[1].split('\n## ')[0] if heading else text

    return read


@pytest.fixture
def quickstart(repository, tmp_path, monkeypatch):
    """The photographs of the first run, where a run in ``tmp_path`` looks for them."""
    folder = tmp_path / 'datasets' / 'quickstart'
    folder.parent.mkdir()
    folder.symlink_to(repository / 'datasets' / 'quickstart')
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def short_opt(train_opt, image_pairs, quickstart):
    """Two iterations at the scale of the guide's examples, with the YAML of a text merged in."""

    def make(text=''):
        opt = train_opt(scale=4, train__total_iter=2)
        gt, lq = image_pairs('x4', scale=4)
        for dataset in opt['datasets'].values():
            dataset.update(dataroot_gt=gt, dataroot_lq=lq)
        for block in blocks(text, 'yaml'):
            merge(opt, yaml_load(block))
        return opt

    return make
