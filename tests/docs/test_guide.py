"""What the guide shows runs, and what it links to is there."""

import json
import re
import runpy
import sys

import torch
from guide import blocks, write_plugins
from runs import log_text, rows

from basicsr.utils import yaml_load
from basicsr.utils.option_tables import Options, TrainDatasetOptions
from basicsr.utils.registry import ARCH_REGISTRY


def test_the_network_of_the_readme_trains(page, run, short_opt, tmp_path):
    text = page('README.md', 'Your own network')
    write_plugins(text, tmp_path)
    folder = run(short_opt(text))
    assert 'Network [MyNet] is created.' in log_text(folder)
    assert len([row for row in rows(folder) if 'losses/l_pix' in row]) == 2


def test_the_examples_of_the_guide_train_together(page, run, short_opt, tmp_path):
    text = page('docs/extending.md')
    write_plugins(text, tmp_path)
    folder = run(short_opt(text))
    for part in ('Network [SkipNet]', 'Dataset [ReducedDataset]', 'Model [TwoLossModel]'):
        assert part in log_text(folder)
    steps = [row for row in rows(folder) if 'lr' in row]
    assert [{'losses/l_pix', 'losses/l_freq'} <= row.keys() for row in steps] == [True, True]
    assert 0 < rows(folder)[-1]['metrics/val/mae'] < 255


def test_the_loss_of_the_guide_trains_alone(page, run, short_opt, tmp_path):
    text = page('docs/extending.md', 'A loss')
    write_plugins(text, tmp_path)
    opt = short_opt(text) | {'plugins': ['.']}
    opt['network_g']['upscale'] = 4
    assert 'Loss [FrequencyLoss] is created.' in log_text(run(opt))


def test_the_sets_of_the_guide_are_mixed_in_a_training(page, run, short_opt, image_pairs):
    text = page('docs/data.md', 'Several sets in one')
    opt = short_opt(text)
    opt['network_g']['upscale'] = 4
    for name in ('photos', 'drawings'):
        image_pairs(name, size=(100, 100), scale=4)
    assert 'Number of train images: 10' in log_text(run(opt))


def test_the_stages_and_the_mixtures_of_the_guide_train_together(page, run, short_opt):
    text = page('docs/data.md', 'Crops that grow') + page('docs/train.md', 'Mixed samples')
    opt = short_opt(text)
    opt['network_g']['upscale'] = 4
    opt['datasets']['train']['pad_small'] = True
    text = log_text(run(opt))
    assert 'From iteration 1 on: crops of 128, 8 per GPU.' in text
    assert 'cutmix:[' in text


def test_a_package_of_ones_own_trains_as_the_guide_says(page, short_opt, tmp_path, monkeypatch):
    network = blocks(page('docs/extending.md', 'A network'), 'python')[0]
    program = blocks(page('docs/extending.md', 'In a package of your own'), 'python')[0]
    (tmp_path / 'my_nets.py').write_text(network)
    (tmp_path / 'train.py').write_text(program)
    (tmp_path / 'x4.yml').write_text(json.dumps(short_opt() | {'network_g': {'type': 'SkipNet'}}))
    # What is registered here is not that of another test.
    monkeypatch.setattr(ARCH_REGISTRY, '_obj_map', dict(ARCH_REGISTRY._obj_map))
    monkeypatch.setattr('basicsr.train.draw_results', lambda *_: None)
    monkeypatch.setattr(sys, 'argv', ['train.py', '-opt', 'x4.yml'])
    monkeypatch.syspath_prepend(tmp_path)
    runpy.run_path('train.py', run_name='__main__')
    del sys.modules['my_nets']
    assert 'Network [SkipNet] is created.' in log_text(tmp_path / 'experiments' / 'tiny')


def test_the_lmdbs_of_the_guide_are_written_and_trained_on(page, run, short_opt):
    text = page('docs/data.md', 'LMDB')
    exec(blocks(text, 'python')[0], {})
    opt = short_opt(text)
    opt['network_g']['upscale'] = 4
    assert 'Number of train images: 10' in log_text(run(opt))


def test_the_discriminator_of_the_guide_trains_and_its_log_is_explained(page, run, short_opt):
    text = page('docs/train.md', 'Adversarial training')
    opt = short_opt(text)
    opt['network_g']['upscale'] = 4
    steps = [row for row in rows(run(opt)) if 'lr' in row]
    logged = {
        tag.rpartition('/')[2] for row in steps for tag in row if '_d_' in tag or '_g_' in tag
    }
    assert {'l_g_gan', 'l_d_fake', 'out_d_real'} < logged
    assert logged <= set(re.findall(r'`(\w+)`', text))


def test_the_averages_of_the_guide_are_made(page, run, short_opt):
    opt = short_opt()
    opt['network_g']['upscale'] = 4
    opt['train'] |= yaml_load(blocks(page('docs/train.md', 'Other averages'), 'yaml')[0])['train']
    weights = torch.load(run(opt) / 'models/net_g_latest.pth', weights_only=True)
    assert set(weights) == {'params', 'params_ema', 'params_swa', 'basicsr'}


def test_the_guide_names_every_option_of_a_degradation(page):
    known = Options.known() - set(Options.model_fields) - {'gt_size'}
    words = set(re.findall(r'`(?:[\w.]+\.)?(\w+)`', page('docs/data.md', 'Degradations')))
    assert {name for name in known if name.removesuffix('2') not in words} == set()


def test_the_table_of_dataset_keys_has_every_key(page):
    table = re.findall(r'^\| (`.+?) \|', page('docs/data.md', 'All keys'), re.MULTILINE)
    filled_in = {'phase', 'scale'}
    assert set(re.findall(r'\w+', ' '.join(table))) == (TrainDatasetOptions.known() - filled_in)


def test_every_yaml_of_the_guide_can_be_read(repository):
    texts = [file.read_text(encoding='utf-8') for file in (repository / 'docs').glob('*.md')]
    found = [yaml_load(block) for text in texts for block in blocks(text, 'yaml')]
    assert len(found) > 8


def test_the_page_of_scripts_names_every_script_and_flags_that_it_has(page, repository):
    text = page('docs/scripts.md')
    folders = ('scripts', 'inference')
    files = [file for folder in folders for file in (repository / folder).rglob('*.*')]
    scripts = {f.name for f in files if f.suffix in ('.py', '.sh', '.sbatch')} - {'common.py'}
    assert {name for name in scripts if name not in text} == set()
    commands = re.findall(r'^(?:python |PORT=\d+ )?(?:scripts|inference)/.*', text, re.MULTILINE)
    assert len(commands) > 10
    for command in commands:
        name = re.search(r'\S+\.(?:py|sh)', command)[0]
        source = (repository / name).read_text(encoding='utf-8')
        for shared in ('utils/options.py', 'commands/prepare.py'):
            source += (repository / 'basicsr' / shared).read_text(encoding='utf-8')
        assert [flag for flag in re.findall(r'--\w+', command) if f"'{flag}'" not in source] == []


def anchors(text):
    """Names of the headings of a Markdown text, as links spell them."""
    headings = re.findall(r'^#+ (.+)$', text, re.MULTILINE)
    return {re.sub(r'[^\w -]', '', heading).lower().replace(' ', '-') for heading in headings}


def test_every_relative_link_leads_to_a_file_and_a_heading_of_it(repository):
    pages = [page for depth in ('', '*/', '*/*/') for page in repository.glob(f'{depth}*.md')]
    broken = []
    for page in pages:
        for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text(encoding='utf-8')):
            if re.match(r'\w+:', link):
                continue
            name, _, heading = link.partition('#')
            target = page.parent / name if name else page
            if not target.exists() or (heading and heading not in anchors(target.read_text())):
                broken.append(f'{page.relative_to(repository)}: {link}')
    assert len(pages) > 8
    assert broken == []
