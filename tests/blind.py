"""Options of adversarial and blind training, made from those of ``train_opt``."""

DEGRADATION = {'second_blur_prob': 0.8}
KERNELS = {'final_sinc_prob': 0.8}
for _stage in ('', '2'):
    DEGRADATION |= {
        f'resize_prob{_stage}': [0.3, 0.4, 0.3],
        f'resize_range{_stage}': [0.3, 1.4],
        f'gaussian_noise_prob{_stage}': 0.5,
        f'noise_range{_stage}': [1, 30],
        f'poisson_scale_range{_stage}': [0.05, 3],
        f'gray_noise_prob{_stage}': 0.4,
        f'jpeg_range{_stage}': [30, 95],
    }
    KERNELS |= {
        f'blur_kernel_size{_stage}': 21,
        f'kernel_list{_stage}': ['iso', 'aniso', 'generalized_iso', 'plateau_aniso'],
        f'kernel_prob{_stage}': [0.4, 0.2, 0.2, 0.2],
        f'sinc_prob{_stage}': 0.1,
        f'blur_sigma{_stage}': [0.2, 3],
        f'betag_range{_stage}': [0.5, 4],
        f'betap_range{_stage}': [1, 2],
    }


def adversarial(opt, model_type='SRGANModel', channels=3):
    """The options with a discriminator and its training."""
    opt['model_type'] = model_type
    opt['network_d'] = {'type': 'UNetDiscriminatorSN', 'num_in_ch': channels, 'num_feat': 2}
    opt['train']['gan_opt'] = {'type': 'GANLoss', 'gan_type': 'vanilla', 'loss_weight': 0.1}
    opt['train']['optim_d'] = {'type': 'Adam', 'lr': 1e-3}
    return opt


def blind(opt, model_type='RealESRNetModel'):
    """The options with a training set that is degraded as it is needed."""
    opt |= DEGRADATION
    opt['model_type'] = model_type
    train = opt['datasets']['train']
    train.update(KERNELS, type='RealESRGANDataset')
    del train['dataroot_lq']
    if model_type == 'RealESRGANModel':
        return adversarial(opt, model_type)
    opt['gt_usm'] = True
    return opt


def recipe_rows(folder, rank=0):
    """What ``log_recipes`` has written."""
    import json

    lines = (folder / f'recipes_{rank}.jsonl').read_text().splitlines()
    return [json.loads(line) for line in lines]
