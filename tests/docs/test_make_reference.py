"""The reference pages are what the code says."""

import importlib.util

import pytest


@pytest.mark.parametrize('name', ['options.md', 'components.md'])
def test_the_reference_is_up_to_date(repository, name):
    spec = importlib.util.spec_from_file_location('make', repository / 'docs/make_reference.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (repository / 'docs' / name).read_text() == module.PAGES[name]()
