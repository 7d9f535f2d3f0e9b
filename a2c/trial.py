from __future__ import annotations

import os

import torch

T = dict(item.split("=") for item in os.environ.get("TRIAL", "").split(",") if item)


def points(config, env_steps, rollout):
    won, lost = int((rollout.rewards > 0).sum()), int((rollout.rewards < 0).sum())
    with open(f"{config.run_dir}/points.csv", "a") as f:
        f.write(f"{env_steps},{won},{lost},{len(rollout)}\n")


COEF = {  # minimax-ish quintic
    "keller": [(3.4445, -4.7750, 2.0315)] * 5,
}


class Muon(torch.optim.Optimizer):
    """Matrices but the heads by orthogonalised momentum; the rest by Adam."""

    def __init__(self, net, lr, eps):
        params = list(net.parameters())
        super().__init__(params, dict(lr=lr))
        heads = {id(p) for m in (net.policy, net.value) for p in m.parameters()}
        self.mats = [p for p in params if p.ndim >= 2 and id(p) not in heads]
        self.rest = [p for p in params if p.ndim < 2 or id(p) in heads]
        self.eps = eps
        self.scale = float(T["muon"])
        self.mu = float(T.get("mu", 0.95))

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.param_groups[0]["lr"]
        for p in self.rest:
            s = self.state[p]
            s["step"] += 1
            t = float(s["step"])
            s["exp_avg"].lerp_(p.grad, 0.1)
            s["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            denom = (s["exp_avg_sq"] / (1 - 0.999**t)).sqrt_().add_(self.eps)
            p.addcdiv_(s["exp_avg"], denom, value=-lr / (1 - 0.9**t))
        for p in self.mats:
            m = self.state[p]["exp_avg"]
            m.lerp_(p.grad, 1 - self.mu)
            u = p.grad.lerp(m, self.mu).flatten(1)
            o = orthogonal(u)
            p.add_(o.view_as(p), alpha=-lr * self.scale * 0.2 * max(u.shape) ** 0.5)


def orthogonal(g):
    """U V^T of g [m, n], by Newton-Schulz on the smaller Gram matrix."""
    flip = g.shape[0] > g.shape[1]
    x = g.T if flip else g
    x = x / (x.norm() + 1e-12)
    r = x @ x.T  # [m, m]
    eye = torch.eye(len(r))
    q = eye
    for a, b, c in COEF["keller"]:
        z = b * r + c * (r @ r) + a * eye
        q = z @ q
        r = z @ r @ z
    o = q @ x
    return o.T if flip else o


def bins(n):
    return torch.linspace(-6, 6, n)


def hl_loss(z, returns):
    n = z.shape[1]
    width = 12 / (n - 1)
    sigma = 0.75 * width
    edges = torch.linspace(-6 - width / 2, 6 + width / 2, n + 1)
    cdf = torch.erf((edges[None] - returns.clamp(-6, 6)[:, None]) / (sigma * 2**0.5))
    p = cdf[:, 1:] - cdf[:, :-1]
    p = p / p.sum(1, keepdim=True)
    return -(p * z.log_softmax(1)).sum(1).mean()


def prioritised(rollout, config, learner, decisions):
    import numpy as np

    r = rollout.returns(learner.replica, config.gamma, config.gae_lambda, config.reward_clip).flatten()
    a = (r - rollout.values.flatten()).abs().numpy().astype(np.float64) ** float(T["prio"]) + 1e-6
    keep = float(T.get("keep", 0.5))
    rng = np.random.default_rng((config.seed, learner.updates, 1))
    # Gumbel top-k: weighted without replacement
    g = np.log(a) + rng.gumbel(size=len(a))
    chosen = np.argsort(-g)[: int(keep * len(a))]
    rng.shuffle(chosen)
    return chosen
