"""What is installed is complete, and no more than the package."""

import subprocess
import sys
import zipfile

import pytest


@pytest.fixture(scope='module')
def wheel(tmp_path_factory, request):
    """The wheel built from the source distribution of the checkout's tracked files."""
    repository = request.config.rootpath
    work = tmp_path_factory.mktemp('build')
    files = [
        'setup.py',
        'pyproject.toml',
        'requirements.txt',
        'MANIFEST.in',
        'README.md',
        'LICENSE',
    ]
    copy = work / 'checkout'
    copy.mkdir()
    for name in files:
        (copy / name).write_bytes((repository / name).read_bytes())
    for file in (repository / 'basicsr').rglob('*'):
        if file.is_file() and '__pycache__' not in file.parts:
            target = copy / file.relative_to(repository)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())

    def call(*arguments, cwd):
        subprocess.run([sys.executable, *arguments], cwd=cwd, check=True, capture_output=True)

    call('setup.py', '-q', 'sdist', '-d', work, cwd=copy)
    sdist = next(work.glob('basicsr-2.0.0*.tar.gz'))
    call('-m', 'tarfile', '-e', sdist, work / 'unpacked', cwd=work)
    call('setup.py', '-q', 'bdist_wheel', '-d', work, cwd=work / 'unpacked/basicsr-2.0.0')
    return next(work.glob('*.whl'))


def test_a_wheel_from_the_sdist_holds_every_file_of_the_package(wheel, repository):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(file.relative_to(repository))
        for file in (repository / 'basicsr').rglob('*')
        if file.is_file() and '__pycache__' not in file.parts
    }
    assert package <= names
    assert {name.partition('/')[0] for name in names} == {'basicsr', 'basicsr-2.0.0.dist-info'}


def test_the_wheel_names_version_dependencies_and_command(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read('basicsr-2.0.0.dist-info/METADATA').decode()
    assert 'Name: basicsr\nVersion: 2.0.0\n' in metadata
    assert 'Requires-Dist: torch>=' in metadata
    assert 'Requires-Python: >=3.11' in metadata
    entry_points = archive.read('basicsr-2.0.0.dist-info/entry_points.txt').decode()
    assert 'basicsr = basicsr.cli:main' in entry_points
