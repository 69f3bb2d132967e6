"""The runner's own options: name, type, default, meaning.

Everything else in an option file belongs to a component (network, dataset, loss, metric,
optimizer), whose constructor signature is its schema.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PositiveInt,
)

from .option_schema import PlainName, Section, check_plain_name

# Top-level options that the training set reads too, if it degrades its images.
DEGRADATION_OPTIONS = (
    'gt_size gt_usm resize_prob resize_prob2 resize_range resize_range2 gaussian_noise_prob '
    'gaussian_noise_prob2 noise_range noise_range2 poisson_scale_range poisson_scale_range2 '
    'gray_noise_prob gray_noise_prob2 jpeg_range jpeg_range2 second_blur_prob'
)


class DatasetOptions(Section):
    """Keys of ``datasets.val*`` and ``datasets.test*``."""

    has_component = True
    also_known = (
        'phase scale dataroot_gt dataroot_lq io_backend meta_info_file meta_info filename_tmpl '
        'recursive exclude gt_size pad_small use_hflip use_rot color mean std cache crop_size '
        'root_weights degrade_on blur_kernel_size blur_kernel_size2 kernel_list kernel_list2 '
        'kernel_prob kernel_prob2 blur_sigma blur_sigma2 betag_range betag_range2 betap_range '
        'betap_range2 sinc_prob sinc_prob2 final_sinc_prob parts weights shards num_samples '
        'shuffle_buffer shuffle_seed sigma'
    )
    # Those that are true or false.
    flags: ClassVar[str] = 'pad_small recursive use_hflip use_rot'

    name: Annotated[str, AfterValidator(lambda name: name and check_plain_name(name))] = Field(
        '', description='used in log lines and result folders; default: the key'
    )
    type: str = Field(description='class in DATASET_REGISTRY')
    num_worker_per_gpu: int = Field(0, ge=0, description='loader processes per rank')
    pin_memory: bool | None = Field(None, description='page-locked batches; ~: if there is a GPU')
    persistent_workers: bool = Field(False, description='keep loader processes between passes')


class StageOptions(Section):
    """Keys of each entry of ``datasets.train.progressive``."""

    model_config = ConfigDict(extra='forbid')

    iters: int | None = Field(None, ge=1, description='length of the stage; optional for the last')
    gt_size: PositiveInt | Annotated[list[PositiveInt], Field(min_length=1)] | None = Field(
        None, description='side of the GT crops, or a list to draw from per batch; ~: gt_size'
    )
    batch_size_per_gpu: int | None = Field(None, ge=1, description='samples; ~: batch_size_per_gpu')


class TrainDatasetOptions(DatasetOptions):
    """Keys of ``datasets.train``."""

    batch_size_per_gpu: int = Field(ge=1, description='samples per rank and step')
    batch_size_total: int | None = Field(
        None,
        ge=1,
        description='samples per step of all GPUs, whatever their number: each takes its share, in '
        'micro-batches of batch_size_per_gpu; ~: batch_size_per_gpu times the GPUs',
    )
    num_worker_per_gpu: int | None = Field(
        None,
        ge=0,
        description="processes per rank; ~: 4, or the rank's share of the cores if that is less",
    )
    dataset_enlarge_ratio: int | float = Field(
        1, gt=0, description='repetitions of the set in an epoch'
    )
    sampler: dict[str, Any] | None = Field(
        None,
        description='order of the samples, {type: …, arguments}: enlarged, sequential, random, '
        'subset_random, weighted_random, streamed, or module:Class; ~: enlarged',
    )
    collate_fn: str | None = Field(
        None, description='module:function that makes a batch from a list of samples'
    )
    prefetch_mode: Literal['cpu', 'cuda'] | None = Field(
        None,
        description='cpu: a thread prefetches batches; cuda: it also copies them to the GPU '
        'ahead of time; ~: cuda with pin_memory, else cpu if there are loader processes',
    )
    cache: str | bool = Field('auto', description='decoded images: auto, off, device, or a folder')
    on_error: Literal['raise', 'skip'] = Field(
        'raise', description='an unreadable image ends the run, or is replaced by another one'
    )
    uint8_batch: bool = Field(
        False, description='8-bit images become floats on the device, not in the loader processes'
    )
    num_prefetch_queue: int = Field(1, ge=1, description='batches that the thread prefetches')
    progressive: list[StageOptions] | None = Field(
        None,
        min_length=1,
        description='stages of the training, one after the other, {iters, gt_size, '
        'batch_size_per_gpu}; ~: all iterations are alike',
    )


class DatasetsOptions(Section):
    """Keys of ``datasets``: each is a phase, or <phase>_<name chosen by the user>."""

    __pydantic_extra__: dict[str, DatasetOptions]

    @classmethod
    def inner(cls, key: str) -> type[Section] | None:
        return super().inner(key) or DatasetOptions

    @classmethod
    def names_files(cls, key: str) -> bool:
        return True


class TrainingDatasets(DatasetsOptions):
    """Keys of ``datasets`` in a training run."""

    also_known = 'val'
    families = ('val_',)
    refusal = 'unknown phase; the datasets here are train, val, val_<name>'

    train: TrainDatasetOptions


class TestDatasets(DatasetsOptions):
    """Keys of ``datasets`` in a test run."""

    also_known = 'val test'
    families = ('val_', 'test_')
    refusal = 'unknown phase; the datasets here are val, val_<name>, test, test_<name>'


class PathOptions(Section):
    """Keys of ``path``."""

    also_known = (
        'pretrain_network_g pretrain_network_d param_key_g param_key_d strict_load_g '
        'strict_load_d models training_states log visualization'
    )
    families = ('pretrain_network_', 'param_key_', 'strict_load_')

    resume_state: str | None = Field(None, description='a .state file to resume from')
    ignore_resume_networks: list[str] | None = Field(
        None, description='network_* that a resume loads from its pretrain_network_*'
    )
    experiments_root: str | None = Field(
        None, description='parent folder of runs; default: experiments'
    )
    results_root: str | None = Field(None, description='parent folder of tests; default: results')
    random_weights: bool = Field(False, description='allow a test without pretrain_network_g')


class ScaleOptions(Section):
    """Keys of ``train.scale_lr``."""

    batch: int = Field(ge=1, description='the batch size that the learning rates are meant for')
    rule: Literal['linear', 'sqrt'] = Field('linear', description='scaling rule for the ratio')


class SwaOptions(Section):
    """Keys of ``train.swa``."""

    refusal = 'unknown key; there are start, every, lr, anneal_iters, anneal and bn_batches'

    start: int | float = Field(
        0.75, gt=0, description='first averaged iteration; below 1: a fraction of total_iter'
    )
    every: int = Field(100, ge=1, description='iterations between averaged weights')
    lr: float | None = Field(
        None, gt=0, description='learning rate of net_g after start; ~: as scheduled'
    )
    anneal_iters: int = Field(500, ge=0, description='iterations of annealing to lr')
    anneal: Literal['cos', 'linear'] = Field('cos', description='shape of the annealing')
    bn_batches: int = Field(
        100, ge=0, description='batches that batch norm statistics are computed from at the end'
    )


class FreezeOptions(Section):
    """Keys of each entry of ``train.freeze``."""

    model_config = ConfigDict(extra='forbid')

    pattern: str = Field(description='a regular expression, matched against parameter names')
    until: int = Field(ge=1, description='last iteration in which they are frozen')


class MixOptions(Section):
    """Keys of ``train.mixing.mixup`` and ``train.mixing.cutmix``."""

    refusal = 'unknown key; there are prob and alpha'

    prob: float = Field(gt=0, le=1, description='fraction of the batches')
    alpha: float = Field(
        1.0, gt=0, le=1000, description='the weight is drawn from Beta(alpha, alpha)'
    )


class MixingOptions(Section):
    """Keys of ``train.mixing``."""

    refusal = 'unknown key; there are mixup and cutmix'

    mixup: MixOptions | None = Field(None, description='weighted sums of two samples')
    cutmix: MixOptions | None = Field(None, description='rectangles from another sample')


class CompileOptions(Section):
    """Keys of ``train.compile``: arguments of ``torch.compile`` that run no other program."""

    refusal = 'unknown key; there are backend, mode, fullgraph and dynamic'

    backend: Literal['inductor', 'eager', 'aot_eager', 'cudagraphs'] = Field(
        'inductor', description='compiler backend'
    )
    mode: (
        Literal['default', 'reduce-overhead', 'max-autotune', 'max-autotune-no-cudagraphs'] | None
    ) = Field(None, description="mode of inductor; ~: 'default'")
    fullgraph: bool = Field(False, description='raise an error on graph breaks')
    dynamic: bool | None = Field(None, description='dynamic shapes; ~: only if sizes vary')


class TrainOptions(Section):
    """Keys of ``train``."""

    also_known = (
        'optim_g optim_d scheduler pixel_opt perceptual_opt losses gan_opt ldl_opt net_d_iters '
        'net_d_init_iters'
    )
    families = ('optim_',)

    total_iter: int = Field(ge=1, description='optimizer steps of the run')
    warmup_iter: int = Field(-1, description='linear learning-rate warm-up; -1: none')
    ema_decay: float = Field(0.0, ge=0, lt=1, description='0: no averaged copy of net_g')
    ema_warmup: bool = Field(False, description='shorter average at the start')
    swa: SwaOptions | None = Field(
        None, description='stochastic weight averaging, saved as params_swa; ~: none'
    )
    posthoc_ema: bool | Annotated[list[float], Field(min_length=2)] = Field(
        False,
        description='store averages, or their lengths, for `basicsr average`, which reconstructs '
        'any length; true: [0.05, 0.1]',
    )
    amp: Literal['bf16', 'fp16'] | None = Field(
        None, description='mixed precision (autocast); ~: float32'
    )
    tf32: bool | None = Field(None, description="TF32 on the GPU; ~: torch's default")
    compile: bool | CompileOptions = Field(
        False, description='torch.compile the trained networks; or its arguments'
    )
    channels_last: bool | Literal['auto'] = Field(
        False, description='memory layout of networks and images; auto: measured in the first step'
    )
    checkpoint_activations: bool = Field(
        False, description='recompute blocks in the backward pass: less memory, a third more time'
    )
    norms: Literal['synced', 'frozen'] | None = Field(
        None, description='batch normalisation: synced over all ranks, or frozen as loaded'
    )
    sharding: Literal['fsdp'] | None = Field(
        None, description='fsdp: split weights and optimizer state over the processes'
    )
    accumulate: int = Field(1, ge=1, description='micro-batches that a batch is split into')
    freeze: list[FreezeOptions] | None = Field(
        None, description='parameters frozen at first, [{pattern, until}]; ~: none'
    )
    clip_grad_norm: float | None = Field(None, gt=0, description='clip the gradient to this norm')
    clip_grad_value: float | None = Field(None, gt=0, description='clip gradient values to this')
    on_nonfinite: Literal['stop', 'skip', 'rollback'] = Field(
        'stop',
        description='if a loss or gradient is not finite: end the run, skip the step, or return to '
        'the last checkpoint and continue with later samples',
    )
    scale_lr: ScaleOptions | None = Field(
        None, description='multiply learning rates by the batch of all ranks over this batch'
    )
    mixing: MixingOptions | None = Field(None, description='mixup and cutmix within some batches')


class ValOptions(Section):
    """Keys of ``val``."""

    val_freq: int | None = Field(
        None, ge=1, description='iterations between validations; ~: only at the end'
    )
    save_img: bool = Field(False, description='write result images')
    suffix: PlainName | None = Field(
        None, description='suffix of image names; ~: the experiment name'
    )
    pbar: bool | None = Field(
        None, description='progress bar over the images; ~: if the output is a terminal'
    )
    metrics: dict[str, dict] | None = Field(None, description='free name: {type: …, arguments}')
    self_ensemble: bool = Field(False, description='mean over eight flips and rotations')
    tile: int | None = Field(
        None, ge=1, description='side of tiles in LQ pixels, for images too large for the memory'
    )
    tile_overlap: int | None = Field(
        None,
        ge=0,
        description='LQ pixels by which tiles are extended, and over which neighbours are '
        'blended; ~: the receptive field, which gives exactly the result of the whole image',
    )
    log_images: int = Field(4, ge=0, description='images per set shown in TensorBoard and wandb')


class WandbOptions(Section):
    """Keys of ``logger.wandb``: arguments of ``wandb.init`` that name no program and no folder."""

    also_known = 'entity mode name group job_type tags notes save_code'
    refusal = (
        'unknown key; there are project, resume_id, entity, mode, name, group, job_type, tags, '
        'notes and save_code; the environment variables of wandb set others'
    )

    project: str | None = Field(None, description='~: no wandb')
    resume_id: str | None = Field(
        None, description='wandb run to resume; ~: that of the run folder'
    )


class BestOptions(Section):
    """Keys of ``logger.keep_best``."""

    refusal = 'unknown key; there are metric and dataset'

    metric: str | None = Field(None, description='one of val.metrics; ~: the first')
    dataset: str | None = Field(None, description='name of a validation set; ~: the first')


class LoggerOptions(Section):
    """Keys of ``logger``."""

    print_freq: int = Field(100, ge=1, description='iterations between log lines')
    save_checkpoint_freq: int = Field(5000, ge=1, description='iterations between checkpoints')
    checkpoint_format: Literal['pth', 'safetensors'] = Field(
        'pth', description='file format of networks'
    )
    keep_last: int | None = Field(
        None, ge=1, description='training states to keep, with their networks; ~: all'
    )
    keep_best: bool | BestOptions = Field(
        False,
        description='write net_g_best after each best validation; true: by the first metric on '
        'the first set',
    )
    use_tb_logger: bool = Field(True, description='TensorBoard events in tb_logger/<name>')
    wandb: WandbOptions = Field(default_factory=WandbOptions.defaults)


class DistOptions(Section):
    """Keys of ``dist_params``."""

    refusal = 'unknown key; there are backend, timeout and port'

    backend: Literal['nccl', 'gloo'] = Field(
        'nccl', description='gloo is used instead of nccl without a GPU or with num_gpu: 0'
    )
    timeout: float = Field(
        1800, gt=0, lt=1e9, description='seconds that processes wait for each other'
    )
    port: int | None = Field(
        None,
        ge=1,
        lt=2**16,
        description='for SLURM; ~: MASTER_PORT, or derived from the job ID',
    )


class Options(Section):
    """Top-level keys."""

    families = ('network_',)
    also_known = (
        f'{DEGRADATION_OPTIONS} high_order_degradation share_degradation queue_size log_recipes '
        'l1_gt_usm percep_gt_usm gan_gt_usm'
    )

    name: PlainName = Field(description='name of the run; debug mode if it contains debug')
    model_type: str = Field(description='class in MODEL_REGISTRY')
    scale: int | None = Field(None, ge=1, description='GT size / LQ size')
    num_gpu: Annotated[int, Field(ge=0)] | Literal['auto'] | None = Field(
        None, description='0: CPU; auto: all GPUs; ~: one GPU if there is one'
    )
    manual_seed: int | None = Field(
        None, ge=0, le=2**62, description='random seed; ~: drawn, and logged'
    )
    deterministic: bool = Field(False, description='only deterministic kernels; slower on GPUs')
    strict_options: bool | Literal['all'] = Field(
        True, description='refuse misspelled keys; all: refuse every key that is not read'
    )
    plugins: list[str] = Field([], description="folders with the user's *_arch.py, *_model.py, …")
    path: PathOptions = Field(default_factory=PathOptions.defaults)
    val: ValOptions | None = None
    dist_params: DistOptions = Field(default_factory=DistOptions.defaults)
    find_unused_parameters: bool = Field(False, description='passed to DistributedDataParallel')

    @classmethod
    def names_files(cls, key: str) -> bool:
        return key.startswith('network_')


class TrainingOptions(Options):
    """Top-level keys of a training run."""

    datasets: TrainingDatasets
    train: TrainOptions
    logger: LoggerOptions = Field(default_factory=LoggerOptions.defaults)

    def contradictions(self) -> Iterator[tuple[tuple[str, ...], str]]:
        path, stages = ('datasets', 'train', 'progressive'), self.datasets.train.progressive or []
        more, total_iter = self.datasets.train.model_extra or {}, self.train.total_iter
        own_size = more.get('gt_size', (self.model_extra or {}).get('gt_size'))
        if self.datasets.train.batch_size_total and any(s.batch_size_per_gpu for s in stages):
            yield path, 'stages with a batch_size_per_gpu of their own contradict batch_size_total'
        for number, stage in enumerate(stages):
            where = *path, str(number)
            if stage.iters is None and stage is not stages[-1]:
                yield where, 'needs iters: only the last stage lasts to the end'
            if stage.gt_size is None and own_size is None:
                yield where, 'needs a gt_size, since datasets.train has none'
            sizes = stage.gt_size if isinstance(stage.gt_size, list) else [stage.gt_size or 0]
            for size in sizes:
                if size % (self.scale or 1):
                    yield (*where, 'gt_size'), f'{size} is not a multiple of scale {self.scale}'
        length = sum(stage.iters or 0 for stage in stages)
        if stages and stages[-1].iters and length < total_iter:
            yield path, f'ends after {length} of {total_iter} iterations: leave out the last iters'

        if self.train.on_nonfinite == 'skip':
            where, others = ('train', 'on_nonfinite'), self.train.model_extra or {}
            if self.train.sharding:
                yield where, 'skip cannot be combined with train.sharding: use rollback or stop'
            for name in ('optim_g', 'optim_d'):
                if isinstance(others.get(name), dict) and str(others[name].get('type')).endswith(
                    'LBFGS'
                ):
                    yield where, f'skip cannot undo the steps of LBFGS ({name}): use rollback'

        mixing = self.train.mixing
        total = sum(mix.prob for mix in (mixing.mixup, mixing.cutmix) if mix) if mixing else 0
        if total > 1 + 1e-9:  # sums of decimal fractions are inexact
            yield ('train', 'mixing'), f'prob of mixup and cutmix add up to {total:g}, above 1'
        if self.logger.keep_best:
            yield from self._best_contradictions()

    def _best_contradictions(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Contradictions of ``logger.keep_best`` with the metrics and validation sets."""
        path, best = ('logger', 'keep_best'), self.logger.keep_best
        metrics = list((self.val.metrics if self.val else None) or ())
        sets = [options.name or key for key, options in (self.datasets.model_extra or {}).items()]
        if not (metrics and sets):
            yield path, 'needs a validation set (datasets.val) and val.metrics'
        elif isinstance(best, BestOptions):
            for key, given, known in (
                ('metric', best.metric, metrics),
                ('dataset', best.dataset, sets),
            ):
                if given is not None and given not in known:
                    yield (*path, key), f'there is no {given}; there are {", ".join(known)}'


class TestOptions(Options):
    """Top-level keys of a test run."""

    datasets: TestDatasets
    val: ValOptions = Field(default_factory=ValOptions.defaults)
