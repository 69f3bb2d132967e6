"""SwinIR: Image Restoration Using Swin Transformer.

Liang, Cao, Sun, Zhang, Van Gool, Timofte, 2021, https://arxiv.org/abs/2108.10257. The blocks are
those of Swin Transformer (Liu et al. 2021, https://arxiv.org/abs/2103.14030): self-attention within
windows, and every second block works on windows shifted by half their size.

Features are images (b, c, h, w) in the convolutions and tokens (b, h * w, c), row by row, in the
transformer layers; ``x_size`` is (h, w). The ``flops`` methods count the multiply-adds of linear
layers, convolutions and attention for one image of the size given to the constructor.
"""

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from basicsr.utils.errors import UserError
from basicsr.utils.registry import ARCH_REGISTRY

from .arch_util import (
    DIV2K_RGB_MEAN,
    Upsample,
    mean_per_channel,
    pad_to_multiple,
    to_2tuple,
    trunc_normal_,
)

logger = logging.getLogger(__name__)

Size = Sequence[int]  # height and width
Layer = Callable[..., nn.Module]  # class of a layer


def drop_path(x: Tensor, drop_prob: float | None = 0.0, training: bool = False) -> Tensor:
    """Zero whole samples with probability p = ``drop_prob`` and scale the others by 1 / (1 - p)."""
    if not drop_prob or not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    kept = torch.rand(shape, dtype=x.dtype, device=x.device) >= drop_prob
    return x / (1 - drop_prob) * kept


class DropPath(nn.Module):
    """Stochastic depth for the branch of a residual block: see ``drop_path``."""

    def __init__(self, drop_prob: float | None = None):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training)


class Mlp(nn.Module):
    """Two linear layers over the last dimension, with an activation between them."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Layer = nn.GELU,
        drop: float = 0.0,
    ):
        super().__init__()
        hidden_features = hidden_features or in_features
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden_features, out_features or in_features)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


def window_partition(x: Tensor, window_size: int) -> Tensor:
    """Cut ``x`` (b, h, w, c) into windows (b * n, window_size, window_size, c), row by row.

    ``h`` and ``w`` are multiples of ``window_size``.
    """
    b, h, w, c = x.shape
    x = x.view(b, h // window_size, window_size, w // window_size, window_size, c)
    return x.transpose(2, 3).reshape(-1, window_size, window_size, c)


def window_reverse(windows: Tensor, window_size: int, h: int, w: int) -> Tensor:
    """Join the windows of ``window_partition`` to (b, h, w, c) again."""
    rows, columns, c = h // window_size, w // window_size, windows.shape[-1]
    x = windows.view(-1, rows, columns, window_size, window_size, c)
    return x.transpose(2, 3).reshape(-1, h, w, c)


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a learned bias per relative position.

    Args:
        dim: Channels, a multiple of ``num_heads``.
        window_size: Height and width of the windows.
        num_heads: Number of heads.
        qkv_bias: Whether queries, keys and values have a bias.
        qk_scale: Factor of the dot products; None: 1 / sqrt(dim / num_heads).
        attn_drop: Dropout probability of the attention weights.
        proj_drop: Dropout probability of the output.
    """

    relative_position_index: Tensor

    def __init__(
        self,
        dim: int,
        window_size: int | Size,
        num_heads: int,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        super().__init__()
        if dim % num_heads != 0:
            raise UserError(
                f'{dim} channels (embed_dim) cannot be divided among {num_heads} heads: '
                'make embed_dim a multiple of each of num_heads.'
            )
        self.dim = dim
        self.window_size = tuple(to_2tuple(window_size))
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5 if qk_scale is None else qk_scale

        height, width = self.window_size
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * height - 1) * (2 * width - 1), num_heads)
        )
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing='ij')
        y, x = y.flatten(), x.flatten()
        dy = y[:, None] - y + height - 1
        dx = x[:, None] - x + width - 1
        self.register_buffer('relative_position_index', dy * (2 * width - 1) + dx)

        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within each window.

        Args:
            x: Windows (b * n, tokens, dim), the n windows of an image one after the other.
            mask: Added to the attention logits of an image's windows, (n, tokens, tokens).
        """
        windows, tokens, dim = x.shape
        qkv = self.qkv(x).view(windows, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        bias = bias[None]  # PyTorch's fused kernels need four dimensions
        if mask is not None:
            bias = bias + mask.repeat(windows // mask.shape[0], 1, 1)[:, None]
        drop = self.attn_drop if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), drop, scale=self.scale)
        x = x.transpose(1, 2).reshape(windows, tokens, dim)
        return self.proj_drop(self.proj(x))

    def extra_repr(self) -> str:
        return f'dim={self.dim}, window_size={self.window_size}, num_heads={self.num_heads}'

    def flops(self, n: int) -> int:
        """Multiply-adds for one window of ``n`` tokens."""
        return n * self.dim * (4 * self.dim + 2 * n)


class SwinTransformerBlock(nn.Module):
    """Window attention and an MLP, each with pre-normalisation and a skip connection.

    Args:
        dim: Channels.
        input_resolution: (h, w) for which the buffer ``attn_mask`` is made; other sizes work too.
            A window as large as its shorter side, or larger, shrinks to it and is not shifted.
        num_heads: Heads of the attention.
        window_size: Side of the square windows.
        shift_size: By how many pixels the windows are shifted.
        mlp_ratio: Hidden channels of the MLP over ``dim``.
        qkv_bias, qk_scale, attn_drop: See ``WindowAttention``.
        drop: Dropout probability of the outputs of attention and MLP.
        drop_path: Probability of dropping a branch in training.
        act_layer, norm_layer: Classes of the MLP's activation and of the normalisation.
    """

    attn_mask: Tensor | None

    def __init__(
        self,
        dim: int,
        input_resolution: Size,
        num_heads: int,
        window_size: int = 7,
        shift_size: int = 0,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        act_layer: Layer = nn.GELU,
        norm_layer: Layer = nn.LayerNorm,
    ):
        super().__init__()
        self.dim = dim
        self.input_resolution = tuple(input_resolution)
        self.num_heads = num_heads
        if min(self.input_resolution) <= window_size:
            window_size, shift_size = min(self.input_resolution), 0
        if not 0 <= shift_size < window_size:
            raise UserError(f'shift_size {shift_size} is not in [0, window_size {window_size}).')
        self.window_size = window_size
        self.shift_size = shift_size
        self.mlp_ratio = mlp_ratio

        self.norm1 = norm_layer(dim)
        self.attn = WindowAttention(
            dim, window_size, num_heads, qkv_bias, qk_scale, attn_drop=attn_drop, proj_drop=drop
        )
        self.drop_path = DropPath(drop_path)
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=drop)

        mask = self.calculate_mask(self.input_resolution) if shift_size > 0 else None
        self.register_buffer('attn_mask', mask)

    def calculate_mask(self, x_size: Size) -> Tensor:
        """Mask (windows, tokens, tokens) added to the attention logits of features of ``x_size``.

        Shifting is a cyclic roll, which puts opposite borders of the features into one window:
        -100 keeps tokens from attending across such a seam.
        """
        device = self.attn.relative_position_index.device
        from_end = (torch.arange(-size, 0, device=device) for size in x_size)
        rows, columns = ((i >= -self.window_size).int() + (i >= -self.shift_size) for i in from_end)
        regions = (3 * rows[:, None] + columns)[None, :, :, None]
        regions = window_partition(regions, self.window_size).flatten(1)
        return -100.0 * (regions[:, None] != regions[:, :, None])

    def forward(self, x: Tensor, x_size: Size, attn_mask: Tensor | None = None) -> Tensor:
        """Transform tokens ``x`` (b, h * w, dim) of ``x_size`` (h, w), multiples of the window.

        ``attn_mask`` is ``calculate_mask(x_size)``, for callers that share it across blocks.
        """
        if self.shift_size == 0:
            attn_mask = None
        elif attn_mask is None:
            own = _is_size(x_size, self.input_resolution)
            attn_mask = self.attn_mask if own else self.calculate_mask(x_size)
        x = x + self.drop_path(self._attend(self.norm1(x), x_size, attn_mask))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def _attend(self, x: Tensor, x_size: Size, attn_mask: Tensor | None) -> Tensor:
        x = x.view(-1, *x_size, self.dim)
        if self.shift_size > 0:
            x = x.roll((-self.shift_size, -self.shift_size), (1, 2))
        windows = window_partition(x, self.window_size).flatten(1, 2)
        x = window_reverse(self.attn(windows, attn_mask), self.window_size, *x_size)
        if self.shift_size > 0:
            x = x.roll((self.shift_size, self.shift_size), (1, 2))
        return x.flatten(1, 2)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        # The mask follows from input_resolution, so weights made for another one fit as well.
        if self.attn_mask is not None and f'{prefix}attn_mask' in state_dict:
            state_dict[f'{prefix}attn_mask'] = self.attn_mask
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f'dim={self.dim}, input_resolution={self.input_resolution}, '
            f'num_heads={self.num_heads}, window_size={self.window_size}, '
            f'shift_size={self.shift_size}, mlp_ratio={self.mlp_ratio}'
        )

    def flops(self) -> int:
        tokens, per_window = math.prod(self.input_resolution), self.window_size**2
        attention = tokens // per_window * self.attn.flops(per_window)
        return attention + 2 * tokens * self.dim * self.mlp.fc1.out_features


class PatchMerging(nn.Module):
    """Halve the height and width of tokens and double their channels.

    Args:
        input_resolution: (h, w) of the tokens, both even.
        dim: Channels of the tokens.
        norm_layer: Class of the normalisation.
    """

    def __init__(
        self,
        input_resolution: Size,
        dim: int,
        norm_layer: Layer = nn.LayerNorm,
    ):
        super().__init__()
        self.input_resolution = tuple(input_resolution)
        if any(side % 2 for side in self.input_resolution):
            raise UserError(f'PatchMerging needs even sides, not {self.input_resolution}.')
        self.dim = dim
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = norm_layer(4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Merge tokens (b, h * w, dim) to (b, h / 2 * w / 2, 2 * dim)."""
        h, w = self.input_resolution
        x = x.view(-1, h // 2, 2, w // 2, 2, self.dim)
        # Swin Transformer's weights expect the four tokens of a square column by column.
        x = x.permute(0, 1, 3, 4, 2, 5).reshape(-1, h * w // 4, 4 * self.dim)
        return self.reduction(self.norm(x))

    def extra_repr(self) -> str:
        return f'input_resolution={self.input_resolution}, dim={self.dim}'

    def flops(self) -> int:
        return math.prod(self.input_resolution) // 4 * self.reduction.weight.numel()


class BasicLayer(nn.Module):
    """A chain of ``depth`` transformer blocks, of which every second one shifts its windows.

    Args:
        drop_path: Probability of dropping a branch, one for all blocks or one for each.
        downsample: Class like ``PatchMerging`` that ends the chain, or None.
        use_checkpoint: Whether the backward pass recomputes the activations, to save memory.

    The other arguments are those of ``SwinTransformerBlock``.
    """

    def __init__(
        self,
        dim: int,
        input_resolution: Size,
        depth: int,
        num_heads: int,
        window_size: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float | Sequence[float] = 0.0,
        norm_layer: Layer = nn.LayerNorm,
        downsample: Layer | None = None,
        use_checkpoint: bool = False,
    ):
        super().__init__()
        self.dim = dim
        self.input_resolution = tuple(input_resolution)
        self.depth = depth
        self.use_checkpoint = use_checkpoint
        self.blocks = nn.ModuleList(
            SwinTransformerBlock(
                dim,
                input_resolution,
                num_heads,
                window_size,
                window_size // 2 if i % 2 else 0,
                mlp_ratio,
                qkv_bias,
                qk_scale,
                drop,
                attn_drop,
                drop_path[i] if isinstance(drop_path, Sequence) else drop_path,
                norm_layer=norm_layer,
            )
            for i in range(depth)
        )
        self.downsample = None
        if downsample is not None:
            self.downsample = downsample(input_resolution, dim=dim, norm_layer=norm_layer)

    def forward(self, x: Tensor, x_size: Size, attn_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            if self.use_checkpoint:
                x = checkpoint(block, x, x_size, attn_mask, use_reentrant=False)
            else:
                x = block(x, x_size, attn_mask)
        return x if self.downsample is None else self.downsample(x)

    def extra_repr(self) -> str:
        return f'dim={self.dim}, input_resolution={self.input_resolution}, depth={self.depth}'

    def flops(self) -> int:
        parts = (SwinTransformerBlock, PatchMerging)
        return sum(part.flops() for part in self.modules() if isinstance(part, parts))


class PatchEmbed(nn.Module):
    """Turn features (b, embed_dim, h, w) into tokens (b, h * w, embed_dim), optionally normalised.

    Args:
        img_size: Height and width, one number if equal.
        patch_size: Pixels of ``img_size`` per token and direction.
        in_chans: Not used, as nothing is projected.
        embed_dim: Channels.
        norm_layer: Class of the normalisation, or None.
    """

    def __init__(
        self,
        img_size: int | Size = 224,
        patch_size: int | Size = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        norm_layer: Layer | None = None,
    ):
        super().__init__()
        self.img_size = tuple(to_2tuple(img_size))
        self.patch_size = tuple(to_2tuple(patch_size))
        sides = zip(self.img_size, self.patch_size, strict=True)
        self.patches_resolution = tuple(side // patch for side, patch in sides)
        self.num_patches = math.prod(self.patches_resolution)
        self.embed_dim = embed_dim
        self.norm = None if norm_layer is None else norm_layer(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        return x if self.norm is None else self.norm(x)

    def flops(self) -> int:
        return 0


class PatchUnEmbed(nn.Module):
    """Turn tokens (b, h * w, embed_dim) into features (b, embed_dim, h, w) again.

    The arguments are those of ``PatchEmbed``; none is needed.
    """

    def __init__(
        self,
        img_size: int | Size = 224,
        patch_size: int | Size = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        norm_layer: Layer | None = None,
    ):
        super().__init__()

    def forward(self, x: Tensor, x_size: Size) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1, *x_size)

    def flops(self) -> int:
        return 0


class RSTB(nn.Module):
    """Residual Swin transformer block: a ``BasicLayer`` and a convolution in a skip connection.

    Args:
        img_size, patch_size: See ``PatchEmbed``.
        resi_connection: '1conv' or '3conv', see ``residual_conv``.

    The other arguments are those of ``BasicLayer``.
    """

    def __init__(
        self,
        dim: int,
        input_resolution: Size,
        depth: int,
        num_heads: int,
        window_size: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float | Sequence[float] = 0.0,
        norm_layer: Layer = nn.LayerNorm,
        downsample: Layer | None = None,
        use_checkpoint: bool = False,
        img_size: int | Size = 224,
        patch_size: int | Size = 4,
        resi_connection: str = '1conv',
    ):
        super().__init__()
        self.dim = dim
        self.input_resolution = tuple(input_resolution)
        self.residual_group = BasicLayer(
            dim,
            input_resolution,
            depth,
            num_heads,
            window_size,
            mlp_ratio,
            qkv_bias,
            qk_scale,
            drop,
            attn_drop,
            drop_path,
            norm_layer,
            downsample,
            use_checkpoint,
        )
        self.conv = residual_conv(dim, resi_connection)
        self.patch_embed = PatchEmbed(img_size, patch_size, embed_dim=dim)
        self.patch_unembed = PatchUnEmbed(img_size, patch_size, embed_dim=dim)

    def forward(self, x: Tensor, x_size: Size, attn_mask: Tensor | None = None) -> Tensor:
        residual = self.patch_unembed(self.residual_group(x, x_size, attn_mask), x_size)
        return x + self.patch_embed(self.conv(residual))

    def flops(self) -> int:
        return self.residual_group.flops() + conv_flops(self.conv, self.input_resolution)


def residual_conv(dim: int, resi_connection: str) -> nn.Module:
    """Convolution at the end of a residual block: 3x3, or three with ``dim // 4`` channels."""
    if resi_connection == '1conv':
        return nn.Conv2d(dim, dim, 3, 1, 1)
    if resi_connection == '3conv':
        return nn.Sequential(
            nn.Conv2d(dim, dim // 4, 3, 1, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(dim // 4, dim // 4, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(dim // 4, dim, 3, 1, 1),
        )
    raise UserError(f"unknown resi_connection {resi_connection!r}: use '1conv' or '3conv'.")


def conv_flops(layers: nn.Module, x_size: Size) -> int:
    """Multiply-adds of the convolutions in a chain of layers on features of ``x_size``."""
    area, flops = math.prod(x_size), 0
    for layer in layers.modules():
        if isinstance(layer, nn.Conv2d):
            flops += area * layer.weight.numel()
        elif isinstance(layer, nn.PixelShuffle):
            area *= layer.upscale_factor**2
    return flops


class UpsampleOneStep(nn.Sequential):
    """One convolution and a pixel shuffle: upsampling with few parameters.

    Args:
        scale: Factor of height and width.
        num_feat: Channels of the features.
        num_out_ch: Channels of the result.
        input_resolution: (h, w) of the features, for ``flops``.
    """

    def __init__(
        self,
        scale: int,
        num_feat: int,
        num_out_ch: int,
        input_resolution: Size | None = None,
    ):
        super().__init__(
            nn.Conv2d(num_feat, scale**2 * num_out_ch, 3, 1, 1), nn.PixelShuffle(scale)
        )
        self.input_resolution = input_resolution

    def flops(self) -> int:
        if self.input_resolution is None:
            raise UserError('UpsampleOneStep counts flops only if built with input_resolution.')
        return conv_flops(self, self.input_resolution)


@ARCH_REGISTRY.register()
class SwinIR(nn.Module):
    """Window-attention network for super-resolution, denoising and removal of JPEG artefacts.

    Args:
        img_size: Height and width of the training inputs, one number if equal. It sets the shape
            of the buffers ``attn_mask`` and nothing else, as long as it is above ``window_size``.
        patch_size: Pixels of ``img_size`` per token and direction; the inputs have one.
        in_chans: Channels of input and output; 3 are RGB, of which a mean is subtracted.
        embed_dim: Channels of the features, a multiple of each of ``num_heads``.
        depths: Transformer blocks of each RSTB.
        num_heads: Attention heads of each RSTB.
        window_size, mlp_ratio, qkv_bias, qk_scale: See ``SwinTransformerBlock``.
        drop_rate: Dropout probability of the tokens and of the outputs of attention and MLP.
        attn_drop_rate: Dropout probability of the attention weights.
        drop_path_rate: Probability of dropping a branch of the last block in training; for the
            blocks before it rises linearly from 0.
        norm_layer: Class of the normalisation.
        ape: Whether a learned position embedding is added to the tokens. It is resized for
            inputs of another size than ``img_size``.
        patch_norm: Whether the first tokens are normalised.
        use_checkpoint: Whether the backward pass recomputes activations, to save memory.
        upscale: Factor of height and width; not used by the upsampler ''.
        img_range: Factor of the values, [0, 1] outside, within the network.
        upsampler: 'pixelshuffle' (classical super-resolution), 'pixelshuffledirect' (lightweight),
            'nearest+conv' (real-world, x4) or '' (same size: the network adds to its input).
        resi_connection: '1conv' or '3conv', see ``residual_conv``.
        kwargs: Ignored, with a warning, since published option files hold keys of other versions.
    """

    mean: Tensor

    def __init__(
        self,
        img_size: int | Size = 64,
        patch_size: int | Size = 1,
        in_chans: int = 3,
        embed_dim: int = 96,
        depths: Sequence[int] = (6, 6, 6, 6),
        num_heads: Sequence[int] = (6, 6, 6, 6),
        window_size: int = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_layer: Layer = nn.LayerNorm,
        ape: bool = False,
        patch_norm: bool = True,
        use_checkpoint: bool = False,
        upscale: int = 2,
        img_range: float = 1.0,
        upsampler: str | None = '',
        resi_connection: str = '1conv',
        **kwargs,
    ):
        super().__init__()
        if kwargs:
            logger.warning('SwinIR ignores unknown options: %s.', ', '.join(sorted(kwargs)))
        if len(depths) != len(num_heads):
            raise UserError(
                f'depths {list(depths)} and num_heads {list(num_heads)} differ in length: give one '
                'number of each per RSTB.'
            )
        mean = torch.tensor(mean_per_channel(DIV2K_RGB_MEAN, in_chans))
        self.register_buffer('mean', mean.view(1, -1, 1, 1), persistent=False)
        self.img_range = img_range
        self.upscale = upscale
        self.upsampler = upsampler or ''
        self.scale = upscale if self.upsampler else 1
        self.embed_dim = embed_dim
        self.conv_first = nn.Conv2d(in_chans, embed_dim, 3, 1, 1)

        self.patch_embed = PatchEmbed(
            img_size, patch_size, embed_dim=embed_dim, norm_layer=norm_layer if patch_norm else None
        )
        self.patch_unembed = PatchUnEmbed(img_size, patch_size, embed_dim=embed_dim)
        self.patches_resolution = self.patch_embed.patches_resolution
        self.window_size = min(window_size, *self.patches_resolution)
        self.ape, self.patch_norm, self.mlp_ratio = ape, patch_norm, mlp_ratio
        self.num_layers, self.num_features = len(depths), embed_dim
        if ape:
            positions = torch.zeros(1, self.patch_embed.num_patches, embed_dim)
            self.absolute_pos_embed = nn.Parameter(trunc_normal_(positions, std=0.02))
        self.pos_drop = nn.Dropout(drop_rate)

        num_blocks = sum(depths)
        drop_paths = [drop_path_rate * i / max(num_blocks - 1, 1) for i in range(num_blocks)]
        self.padded_resolution = tuple(
            side + -side % self.window_size for side in self.patches_resolution
        )
        self.layers = nn.ModuleList(
            RSTB(
                embed_dim,
                self.padded_resolution,
                depth,
                heads,
                window_size,
                mlp_ratio,
                qkv_bias,
                qk_scale,
                drop_rate,
                attn_drop_rate,
                drop_paths[sum(depths[:i]) :],
                norm_layer,
                use_checkpoint=use_checkpoint,
                img_size=img_size,
                patch_size=patch_size,
                resi_connection=resi_connection,
            )
            for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True))
        )
        self.norm = norm_layer(embed_dim)
        self.conv_after_body = residual_conv(embed_dim, resi_connection)
        self._make_head(in_chans)
        self.apply(_init_linear)

    def _make_head(self, channels: int) -> None:
        if self.upsampler == '':
            self.conv_last = nn.Conv2d(self.embed_dim, channels, 3, 1, 1)
            return
        if self.upsampler == 'pixelshuffledirect':
            self.upsample = UpsampleOneStep(
                self.upscale, self.embed_dim, channels, self.padded_resolution
            )
            return
        features = 64  # in every published model
        self.conv_before_upsample = nn.Sequential(
            nn.Conv2d(self.embed_dim, features, 3, 1, 1), nn.LeakyReLU(inplace=True)
        )
        if self.upsampler == 'pixelshuffle':
            self.upsample = Upsample(self.upscale, features)
        elif self.upsampler != 'nearest+conv':
            raise UserError(
                f"unknown upsampler {self.upsampler!r}: use 'pixelshuffle', 'pixelshuffledirect', "
                "'nearest+conv' or '' (output of the input's size)."
            )
        elif self.upscale != 4:
            raise UserError(
                f"upsampler 'nearest+conv' has scale 4, not {self.upscale}: set upscale to 4 or "
                "use 'pixelshuffle'."
            )
        else:
            self.conv_up1 = nn.Conv2d(features, features, 3, 1, 1)
            self.conv_up2 = nn.Conv2d(features, features, 3, 1, 1)
            self.conv_hr = nn.Conv2d(features, features, 3, 1, 1)
        self.conv_last = nn.Conv2d(features, channels, 3, 1, 1)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that should have no weight decay."""
        return {'absolute_pos_embed'}

    def no_weight_decay_keywords(self) -> set[str]:
        """Parts of the names of such parameters."""
        return {'relative_position_bias_table'}

    def forward_features(self, x: Tensor) -> Tensor:
        """Pass features (b, embed_dim, h, w), multiples of the window, through all RSTBs."""
        x_size = x.shape[-2], x.shape[-1]
        attn_mask = self._shared_mask(x_size)
        x = self.patch_embed(x)
        if self.ape:
            x = x + self._position_embedding(x_size)
        x = self.pos_drop(x)
        for layer in self.layers:
            x = layer(x, x_size, attn_mask)
        return self.patch_unembed(self.norm(x), x_size)

    def _shared_mask(self, x_size: Size) -> Tensor | None:
        """Mask of all shifted blocks, None where they have their own or none is needed."""
        if _is_size(x_size, self.padded_resolution):
            return None
        for block in self.modules():
            if isinstance(block, SwinTransformerBlock) and block.shift_size > 0:
                return block.calculate_mask(x_size)
        return None

    def _position_embedding(self, x_size: Size) -> Tensor:
        if _is_size(x_size, self.patches_resolution):
            return self.absolute_pos_embed
        image = self.absolute_pos_embed.transpose(1, 2).unflatten(2, self.patches_resolution)
        image = F.interpolate(image, x_size, mode='bicubic', align_corners=False)
        return image.flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Restore images (b, in_chans, h, w) of any size, to ``upscale`` times it."""
        h, w = x.shape[-2:]
        x = (pad_to_multiple(x, self.window_size) - self.mean) * self.img_range
        features = self.conv_first(x)
        features = features + self.conv_after_body(self.forward_features(features))
        x = self._reconstruct(features) if self.upsampler else x + self.conv_last(features)
        x = x / self.img_range + self.mean
        return x[..., : h * self.scale, : w * self.scale]

    def _reconstruct(self, x: Tensor) -> Tensor:
        if self.upsampler == 'pixelshuffledirect':
            return self.upsample(x)
        x = self.conv_before_upsample(x)
        if self.upsampler == 'pixelshuffle':
            return self.conv_last(self.upsample(x))
        for conv in (self.conv_up1, self.conv_up2):
            x = F.leaky_relu(conv(F.interpolate(x, scale_factor=2, mode='nearest')), 0.2)
        return self.conv_last(F.leaky_relu(self.conv_hr(x), 0.2))

    def flops(self) -> int:
        h, w = self.padded_resolution
        scales = {'conv_first': 1, 'conv_after_body': 1, 'conv_before_upsample': 1, 'upsample': 1}
        scales |= {'conv_up1': 2, 'conv_up2': 4, 'conv_hr': 4, 'conv_last': self.scale}
        total = sum(layer.flops() for layer in self.modules() if isinstance(layer, RSTB))
        for name, layer in self.named_children():
            if name in scales:
                total += conv_flops(layer, (h * scales[name], w * scales[name]))
        return total


def _is_size(x_size: Size, known: Size) -> bool:
    """Whether what is kept for features of one size serves; never in a graph, for all sizes."""
    is_graph = torch.compiler.is_exporting() or torch.jit.is_tracing()
    return not is_graph and tuple(x_size) == tuple(known)


def _init_linear(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
