"""Networks of other packages, by the names that option files give them.

``type: timm.models:VisionTransformer`` is a class of an installed package or a plug-in folder.
``type: spandrel:SPAN`` is one of spandrel, the library of chaiNNer and ComfyUI, by its class alone:
https://github.com/chaiNNer-org/spandrel
"""

import inspect

from torch import Tensor, nn

from basicsr.utils.errors import MissingPackageError, UserError
from basicsr.utils.registry import import_name
from basicsr.utils.text import did_you_mean


def network_class(name: str) -> type[nn.Module]:
    """The class that ``module:Class`` names.

    Raises:
        ImportError: spandrel is not installed.
        ValueError: There is no such class, or it is no ``nn.Module``.
    """
    package, _, short = name.partition(':')
    if package != 'spandrel':
        return import_name(name, 'type', nn.Module)
    classes = _of_spandrel()
    if short not in classes:
        raise UserError(
            f"type '{name}': spandrel has no network '{short}'{did_you_mean(short, classes)} It "
            f'has {", ".join(sorted(classes))}.'
        )
    return classes[short]


def _of_spandrel() -> dict[str, type[nn.Module]]:
    try:
        from spandrel import architectures
    except ImportError as error:
        raise MissingPackageError('networks of spandrel need: pip install spandrel') from error
    families = [part for part in vars(architectures).values() if inspect.ismodule(part)]
    named = [(n, getattr(part, n)) for part in families for n in getattr(part, '__all__', ())]
    return {
        name: value
        for name, value in named
        if isinstance(value, type) and issubclass(value, nn.Module)
    }


def copy_input(net: nn.Module, inputs: tuple) -> tuple:
    """A forward pre-hook: what the network changes in place is a copy of its input."""
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in inputs)
