"""The option reference is what the tables say."""

import importlib.util


def test_the_option_reference_is_up_to_date(repository):
    spec = importlib.util.spec_from_file_location('make', repository / 'docs/make_options.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (repository / 'docs/options.md').read_text() == module.reference()
