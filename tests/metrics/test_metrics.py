import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
from golden import call, params, recipe

import basicsr.metrics
from basicsr.metrics import calculate_metric
from basicsr.utils.registry import METRIC_REGISTRY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    'case', params('metrics', lambda c: 'calculate_metric' in c.get('target', ''))
)
def test_metric_equals_the_reference(case):
    assert recipe.compare(case, call(case)) is None


def test_options_and_data_stay_as_they_are():
    img = recipe.det_image('metric', 16, 16)
    data, opt = {'img': img, 'img2': img}, {'type': 'calculate_ssim', 'crop_border': 0}
    assert [calculate_metric(data, opt) for _ in range(2)] == pytest.approx([1, 1])
    assert opt == {'type': 'calculate_ssim', 'crop_border': 0} and list(data) == ['img', 'img2']


def test_an_unknown_metric_and_a_missing_argument_are_named():
    data = {'img': np.zeros((16, 16)), 'img2': np.zeros((16, 16))}
    with pytest.raises(KeyError, match='Did you mean calculate_psnr'):
        calculate_metric(data, {'type': 'calculate_pnsr'})
    with pytest.raises(KeyError, match="have no 'type', the name of the metric"):
        calculate_metric(data, {'crop_border': 0})
    with pytest.raises(TypeError, match='crop_border') as info:
        calculate_metric(data, {'type': 'calculate_psnr'})
    message = ''.join(traceback.format_exception(info.value))
    assert "while building metric 'calculate_psnr'" in message


def test_metrics_can_be_imported_from_the_package():
    for name in ('calculate_psnr', 'calculate_ssim', 'calculate_niqe'):
        assert getattr(basicsr.metrics, name) is METRIC_REGISTRY.get(name)
    with pytest.raises(ImportError, match='calculate_nothing'):
        from basicsr.metrics import calculate_nothing  # noqa: F401 (the import is the test)


def test_importing_the_package_loads_no_library():
    code = 'import sys, basicsr.metrics; print({"cv2", "scipy", "torch"} & set(sys.modules))'
    run = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == 'set()\n'
