"""Authority on pinning Triton's autotuner: the first configuration that survives pruning, and no timing."""

from triton.runtime.autotuner import Autotuner

_pinned = False


def pin() -> None:
    """From now on no autotuner of this process times anything: where there is no driver, or where tuning would cost
    minutes.
    """
    global _pinned
    if _pinned:
        return
    _pinned = True

    def run(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args))
        configs = self.configs
        if self.early_config_prune:
            configs = self.early_config_prune(self.configs, self.nargs, **kwargs) or self.configs
        self.best_config = config = configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
        result = self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
        self.nargs = None
        return result

    Autotuner.run = run
