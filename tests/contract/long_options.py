"""Sections of option files as projects on BasicSR 1.x have them, with every key spelled out.

Braces are for ``str.format``. A section may go on in the next one.
"""

GENERAL = """
    # general settings
    name: long
    model_type: {model_type}
    scale: 2
    num_gpu: 0  # set num_gpu: 0 for cpu mode
    manual_seed: 7
    find_unused_parameters: false
"""

DEGRADATION = """
    # ----------------- options for synthesizing training data ----------------- #
    # the first degradation process
    resize_prob: [0.3, 0.4, 0.3]  # up, down, keep
    resize_range: [0.3, 1.4]
    gaussian_noise_prob: 0.5
    noise_range: [1, 30]
    poisson_scale_range: [0.05, 3]
    gray_noise_prob: 0.4
    jpeg_range: [30, 95]
    # the second degradation process
    second_blur_prob: 0.8
    resize_prob2: [0.3, 0.4, 0.3]
    resize_range2: [0.3, 1.4]
    gaussian_noise_prob2: 0.5
    noise_range2: [1, 30]
    poisson_scale_range2: [0.05, 3]
    gray_noise_prob2: 0.4
    jpeg_range2: [30, 95]
    gt_size: 16
    queue_size: 0
    high_order_degradation: true
"""

USM_NET = """
    gt_usm: True  # USM the ground-truth
"""

USM_GAN = """
    l1_gt_usm: True
    percep_gt_usm: True
    gan_gt_usm: False
"""

PAIRED = """
    datasets:
      train:
        name: DIV2K
        type: PairedImageDataset
        dataroot_gt: {gt}
        dataroot_lq: {lq}
        meta_info_file: {folder}/in_gt.txt
        filename_tmpl: '{{}}'
        io_backend:
          type: disk
        color: ~
        mean: ~
        std: ~
"""

BLIND = """
    datasets:
      train:
        name: DF2K+OST
        type: RealESRGANDataset
        dataroot_gt: {folder}
        meta_info: {folder}/below.txt
        io_backend:
          type: disk
        blur_kernel_size: 21
        kernel_list: ['iso', 'aniso', 'generalized_iso', 'plateau_aniso']
        kernel_prob: [0.4, 0.2, 0.2, 0.2]
        sinc_prob: 0.1
        blur_sigma: [0.2, 3]
        betag_range: [0.5, 4]
        betap_range: [1, 2]
        blur_kernel_size2: 21
        kernel_list2: ['iso', 'aniso', 'generalized_iso', 'plateau_aniso']
        kernel_prob2: [0.4, 0.2, 0.2, 0.2]
        sinc_prob2: 0.1
        blur_sigma2: [0.2, 3]
        betag_range2: [0.5, 4]
        betap_range2: [1, 2]
        final_sinc_prob: 0.8
"""

LOADER = """
        gt_size: 16
        use_hflip: True
        use_rot: True
        # data loader
        use_shuffle: true
        num_worker_per_gpu: {workers}
        batch_size_per_gpu: 2
        dataset_enlarge_ratio: 10
        prefetch_mode: {prefetch_mode}
        num_prefetch_queue: 1
        pin_memory: {pin_memory}
        persistent_workers: false
      val:
        name: Set5
        type: PairedImageDataset
        dataroot_gt: {val_gt}
        dataroot_lq: {val_lq}
        io_backend:
          type: disk
      val_2:
        name: Set14
        type: PairedImageDataset
        dataroot_gt: {val_gt}
        dataroot_lq: {val_lq}
        io_backend:
          type: disk

    # network structures
"""

COMPACT = """
    network_g:
      type: SRVGGNetCompact
      num_in_ch: 3
      num_out_ch: 3
      num_feat: 4
      num_conv: 1
      upscale: 2
      act_type: prelu
"""

SWINIR = """
    network_g:
      type: SwinIR
      upscale: 2
      in_chans: 3
      img_size: 8
      window_size: 4
      img_range: 1.
      depths: [2]
      embed_dim: 12
      num_heads: [2]
      mlp_ratio: 2
      upsampler: 'pixelshuffle'
      resi_connection: '1conv'
"""

DISCRIMINATOR = """
    network_d:
      type: UNetDiscriminatorSN
      num_in_ch: 3
      num_feat: 2
      skip_connection: True
"""

PATHS = """
    # path
    path:
      pretrain_network_g: ~
      param_key_g: params
      strict_load_g: true
      resume_state: ~
      ignore_resume_networks: ~
"""

PATHS_D = """
      pretrain_network_d: ~
      param_key_d: params
      strict_load_d: true
"""

TRAINING = """
    # training settings
    train:
      ema_decay: 0.9
      optim_g:
        type: Adam
        lr: !!float 1e-3
        weight_decay: 0
        betas: [0.9, 0.99]
      scheduler:
        type: {scheduler}
      total_iter: 4
      warmup_iter: -1  # no warm up
      # losses
      pixel_opt:
        type: L1Loss
        loss_weight: 1.0
        reduction: mean
"""

MULTI_STEP = """MultiStepLR
        milestones: [2]
        gamma: 0.5
"""

COSINE = """CosineAnnealingRestartLR
        periods: [2, 2]
        restart_weights: [1, 1]
        eta_min: !!float 1e-7
"""

ADVERSARIAL = """
      optim_d:
        type: Adam
        lr: !!float 1e-3
        weight_decay: 0
        betas: [0.9, 0.99]
      gan_opt:
        type: GANLoss
        gan_type: vanilla
        real_label_val: 1.0
        fake_label_val: 0.0
        loss_weight: !!float 1e-1
      net_d_iters: 1
      net_d_init_iters: 0
"""

PERCEPTUAL = """
      ldl_opt:
        type: L1Loss
        loss_weight: 1.0
        reduction: mean
      perceptual_opt:
        type: PerceptualLoss
        layer_weights:
          'conv1_1': !!float 1
        vgg_type: vgg11
        use_input_norm: true
        range_norm: false
        perceptual_weight: 1.0
        style_weight: 0
        criterion: l1
        weights: random  # the one key that 1.x has not: nothing is downloaded
"""

CLOSING = """
    # validation settings
    val:
      val_freq: !!float 2e0
      save_img: false
      suffix: ~
      pbar: False
      metrics:
        psnr: # metric name, can be arbitrary
          type: calculate_psnr
          crop_border: 2
          test_y_channel: false
          better: higher  # the higher, the better. Default: higher

    # logging settings
    logger:
      print_freq: 1
      save_checkpoint_freq: !!float 2
      use_tb_logger: false
      wandb:
        project: ~
        resume_id: ~

    # dist training settings
    dist_params:
      backend: nccl
      port: 29500
"""


TESTING = """
    name: long
    model_type: SRModel
    scale: 2
    num_gpu: 0
    manual_seed: 0

    datasets:
      test_1:  # the 1st test dataset
        name: Set5
        type: PairedImageDataset
        dataroot_gt: {gt}
        dataroot_lq: {lq}
        filename_tmpl: '{{}}'
        io_backend:
          type: disk
      test_2:
        name: Set14
        type: SingleImageDataset
        dataroot_lq: {lq}
        io_backend:
          type: disk
{network}
    path:
      pretrain_network_g: {weights}
      param_key_g: params_ema
      strict_load_g: true

    val:
      save_img: true
      suffix: x2  # add suffix to saved images, if None, use exp name
      metrics:
        psnr:
          type: calculate_psnr
          crop_border: 2
          input_order: HWC
          test_y_channel: true
        ssim:
          type: calculate_ssim
          crop_border: 2
          test_y_channel: false

    dist_params:
      backend: nccl
      port: 29500
"""
