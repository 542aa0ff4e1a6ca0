from lightning.pytorch import Callback


class Heartbeat(Callback):
    pass
