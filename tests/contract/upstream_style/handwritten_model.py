import os.path as osp
from collections import OrderedDict

import torch
from torch.nn import functional as F
from tqdm import tqdm

from basicsr.losses import build_loss
from basicsr.metrics import calculate_metric
from basicsr.models.sr_model import SRModel
from basicsr.utils import get_root_logger, imwrite, tensor2img
from basicsr.utils.registry import MODEL_REGISTRY


@MODEL_REGISTRY.register()
class HandwrittenModel(SRModel):
    """A model that leaves little of SRModel in place."""

    def init_training_settings(self):
        super().init_training_settings()
        self.cri_edge = build_loss(self.opt['train']['edge_opt']).to(self.device)
        get_root_logger().info('Edge loss is used.')

    def setup_optimizers(self):
        train_opt = self.opt['train']
        optim_type = train_opt['optim_g'].pop('type')
        params = [v for v in self.net_g.parameters() if v.requires_grad]
        self.optimizer_g = self.get_optimizer(optim_type, params, **train_opt['optim_g'])
        self.optimizers.append(self.optimizer_g)

    def feed_data(self, data):
        self.lq = data['lq'].to(self.device)
        if 'gt' in data:
            self.gt = data['gt'].to(self.device)

    def optimize_parameters(self, current_iter):
        self.optimizer_g.zero_grad()
        self.output = self.net_g(self.lq)
        l_total = 0
        loss_dict = OrderedDict()
        if self.cri_pix:
            l_pix = self.cri_pix(self.output, self.gt)
            l_total += l_pix
            loss_dict['l_pix'] = l_pix
        l_edge = self.cri_edge(self.output.diff(dim=-1), self.gt.diff(dim=-1))
        l_total += l_edge
        loss_dict['l_edge'] = l_edge
        l_total.backward()
        self.optimizer_g.step()
        self.log_dict = self.reduce_loss_dict(loss_dict)
        if self.ema_decay > 0:
            self.model_ema(decay=self.ema_decay)

    def test(self):
        window, scale = 8, self.opt.get('scale', 1)
        _, _, h, w = self.lq.size()
        pad_h, pad_w = -h % window, -w % window
        img = F.pad(self.lq, (0, pad_w, 0, pad_h), 'reflect')
        if hasattr(self, 'net_g_ema'):
            self.net_g_ema.eval()
            with torch.no_grad():
                self.output = self.net_g_ema(img)
        else:
            self.net_g.eval()
            with torch.no_grad():
                self.output = self.net_g(img)
            self.net_g.train()
        self.output = self.output[:, :, : h * scale, : w * scale]

    def dist_validation(self, dataloader, current_iter, tb_logger, save_img):
        if self.opt['rank'] == 0:
            self.nondist_validation(dataloader, current_iter, tb_logger, save_img)

    def nondist_validation(self, dataloader, current_iter, tb_logger, save_img):
        dataset_name = dataloader.dataset.opt['name']
        with_metrics = self.opt['val'].get('metrics') is not None
        if with_metrics:
            self.start_metrics()
            self._initialize_best_metric_results(dataset_name)
        pbar = tqdm(total=len(dataloader), unit='image', disable=not self.opt['val'].get('pbar'))
        for val_data in dataloader:
            img_name = osp.splitext(osp.basename(val_data['lq_path'][0]))[0]
            self.feed_data(val_data)
            self.test()
            visuals = self.get_current_visuals()
            sr_img = tensor2img([visuals['result']])
            metric_data = {'img': sr_img}
            if 'gt' in visuals:
                metric_data['img2'] = tensor2img([visuals['gt']])
                del self.gt
            del self.lq
            del self.output
            torch.cuda.empty_cache()
            if save_img:
                folder = osp.join(self.opt['path']['visualization'], img_name)
                imwrite(sr_img, osp.join(folder, f'{img_name}_{current_iter}.png'))
            if with_metrics:
                for name, opt_ in self.opt['val']['metrics'].items():
                    self.metric_results[name] += calculate_metric(metric_data, opt_)
            pbar.update(1)
        pbar.close()
        if with_metrics:
            for metric in self.metric_results:
                self.metric_results[metric] /= len(dataloader)
                value = self.metric_results[metric]
                self._update_best_metric_result(dataset_name, metric, value, current_iter)
            self._log_validation_metric_values(current_iter, dataset_name, tb_logger)

    def start_metrics(self):
        self.metric_results = dict.fromkeys(self.opt['val']['metrics'], 0)


@MODEL_REGISTRY.register()
class OnceStartedModel(HandwrittenModel):
    """A model that takes a missing ``metric_results`` for the sign of its first validation."""

    def start_metrics(self):
        if not hasattr(self, 'metric_results'):
            super().start_metrics()
        self.metric_results = dict.fromkeys(self.metric_results, 0)
