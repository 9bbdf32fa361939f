import torch, qkeel, traceback
torch.set_num_threads(1)
import qkeel.patching.modes as m
orig = m.FaultGuard.__call__
def call(self, act, *a, **k):
    def inner(*a, **k):
        try: return act(*a, **k)
        except Exception: traceback.print_exc(); raise
    return orig(self, inner, *a, **k)
m.FaultGuard.__call__ = call
model = qkeel.nn.Decoder(qkeel.nn.DecoderConfig(vocab_size=20))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
with qkeel.watch(model, opt, stats="all+residual") as mon:
    for i in range(3):
        for _ in range(2):
            model(torch.randint(0,20,(2,8))).square().mean().backward()
        opt.step()
    s = mon.sample
    print({k: round(v,4) for k, v in s.values.items()})
    sn = next(iter(mon._models._numbers.values()))
    print(sn._stream.branches)
