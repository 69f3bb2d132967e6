"""Settings of the web version of the guide: python -m sphinx -W -c docs . build/site"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package in this checkout

project = 'basicsr'
html_title = 'basicsr 2'
html_theme = 'furo'
html_show_copyright = False
highlight_language = 'none'  # of blocks that name no language
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
autodoc_member_order = 'bysource'
autodoc_typehints_format = 'short'
myst_heading_anchors = 3  # links such as train.md#resuming

# The source folder is the checkout, so that pages may link to the README files beside the code.
root_doc = 'docs/index'
include_patterns = ['*.md', 'docs/*.md', '*/README.md', 'datasets/quickstart/README.md']
exclude_patterns = ['.*', 'build', 'results', 'experiments/*/*', 'datasets/[!q]*']
