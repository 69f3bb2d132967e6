"""``basicsr list``: what option files can name."""

import re


def test_networks_are_listed_with_sentence_and_paper(command):
    status, out, _ = command('list', 'networks')
    assert status == 0
    assert re.search(r'^RCAN +Enlarge images .* https://arxiv.org/abs/1807.02758$', out, re.M)


def test_one_of_them_is_shown_with_its_arguments(command):
    _, out, _ = command('list', 'losses', 'CharbonnierLoss')
    assert out.startswith('CharbonnierLoss (basicsr/losses/basic_loss.py)\n')
    assert re.search(r'^  loss_weight +float +1.0 +Factor of the loss.$', out, re.M)
    _, out, _ = command('list', 'networks', 'EDSR')
    assert re.search(r'^  num_in_ch +int +required +channels of the input$', out, re.M)


def test_the_keys_of_a_dataset_are_those_of_its_docstring(command):
    _, out, _ = command('list', 'datasets', 'PairedImageDataset')
    assert '* dataroot_gt, dataroot_lq: folders, LMDBs' in out


def test_a_misspelt_name_is_corrected_without_torch(run_program):
    result = run_program(
        '-c',
        'import sys; sys.argv = ["basicsr", "list", "metrics", "calculate_psn"]\n'
        'from basicsr import cli\n'
        'try: cli.main()\n'
        'finally: print({"torch", "numpy"} & set(sys.modules))',
    )
    assert (result.returncode, result.stdout) == (2, 'set()\n')
    assert "did you mean 'calculate_psnr'? See: basicsr list metrics" in result.stderr
