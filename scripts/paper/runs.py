"""Every run of the ZeRO paper's evaluation (arXiv 1910.02054, SC20 with its artifact appendix), and its errata."""

import dataclasses

from models.gpt2 import PRESETS, Config


def block_params(config: Config) -> int:
    """12 L h^2: the paper's measure of size, without embeddings, biases and norms."""
    return 12 * config.num_layers * config.width**2


# What the paper prints that cannot be, by preset.
ERRATA: dict[str, str] = {
    "40b": "arXiv v3, Table 4, prints hidden 4096: 17.7B. The appendix and SC20 print 6144.",
    "60b": "arXiv v3, Table 4, prints hidden 4096: 26.6B. The appendix and SC20 print 6144.",
    "1.38b": "Fig. 4's baseline 40 x 1536 is 1.13B, 1.21B with embeddings: the label does not fit.",
    "17b": "28 heads do not divide by MP 16, as the appendix asks: Turing-NLG ran with MP 4.",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the paper's evaluation, as the appendix of SC20 prints it.

    batch: sequences in each tensor-parallel group; total_batch: in all of them, as printed. system:
    "ZeRO", or its row C1 to C5 of Table 3 where a figure compares those, or "Megatron" or "DDP".
    """

    figure: int
    preset: str
    gpus: int
    tensor_parallel: int
    heads: int
    batch: int
    total_batch: int
    system: str = "ZeRO"

    @property
    def baseline(self) -> bool:
        """Whether it ran without ZeRO."""
        return self.system in ("Megatron", "DDP")

    @property
    def config(self) -> Config:
        """The preset with the heads of this run."""
        return dataclasses.replace(PRESETS[self.preset], num_heads=self.heads)


RUNS: tuple[Run, ...] = (
    Run(2, "1.5b", 400, 1, 16, 24, 9600), Run(2, "1.5b", 400, 2, 16, 16, 3200, "Megatron"),
    Run(2, "8b", 400, 4, 24, 64, 6400), Run(2, "8b", 400, 8, 24, 8, 400, "Megatron"),
    Run(2, "20b", 400, 4, 32, 32, 3200), Run(2, "20b", 400, 16, 32, 4, 100, "Megatron"),
    Run(2, "40b", 400, 4, 32, 12, 1200), Run(2, "40b", 384, 32, 64, 4, 48, "Megatron"),
    Run(2, "60b", 400, 16, 32, 64, 1600), Run(2, "60b", 384, 64, 64, 4, 24, "Megatron"),
    Run(2, "80b", 400, 16, 64, 32, 800), Run(2, "80b", 384, 128, 128, 4, 12, "Megatron"),
    Run(2, "100b", 400, 16, 64, 32, 800), Run(2, "100b", 384, 128, 128, 2, 6, "Megatron"),
    Run(2, "120b", 400, 16, 64, 24, 600), Run(2, "120b", 384, 128, 128, 2, 6, "Megatron"),
    Run(2, "140b", 400, 16, 64, 16, 400), Run(2, "140b", 384, 128, 128, 2, 6, "Megatron"),
    Run(2, "170b", 400, 16, 64, 12, 300), Run(2, "170b", 256, 256, 256, 2, 2, "Megatron"),
    *(Run(3, "60b-75x8192", gpus, 16, 32, batch, total)
      for gpus, batch, total in ((64, 16, 64), (128, 48, 384), (256, 48, 768), (400, 64, 1600))),
    Run(4, "1.16b", 128, 1, 16, 8, 1024, "DDP"), Run(4, "1.38b", 128, 1, 16, 1, 128, "DDP"),
    Run(4, "1.5b-34x1920", 128, 1, 16, 24, 3072), Run(4, "2.5b", 128, 1, 16, 24, 3072),
    Run(4, "4b", 128, 1, 24, 16, 2048), Run(4, "6b", 128, 1, 24, 12, 1536),
    Run(4, "8b", 128, 1, 24, 8, 1024), Run(4, "10b", 128, 1, 32, 6, 768),
    Run(4, "11b", 128, 1, 32, 4, 512), Run(4, "12b", 128, 1, 32, 4, 512),
    Run(4, "13b", 128, 1, 32, 2, 256),
    Run(6, "40b-50x8192", 400, 16, 32, 16, 400, "C1"), Run(6, "60b", 400, 16, 64, 16, 400, "C2"),
    Run(6, "50b", 400, 16, 32, 16, 400, "C3"), Run(6, "140b", 400, 16, 64, 16, 400, "C4"),
    Run(6, "150b", 400, 16, 64, 16, 400, "C5"),
    # Their heads are those of the same shapes above, and their totals follow from the rule: no source at hand has them.
    Run(7, "40b-50x8192", 400, 16, 32, 16, 400), Run(7, "100b", 400, 16, 64, 32, 800),
    *(Run(8, "60b-75x8192", 128, 16, 32, batch, total, system) for system, batch, total in (
        ("C1", 2, 16), ("C2", 4, 32), ("C3", 32, 256), ("C4", 32, 256), ("C5", 8, 64))),
    Run(8, "170b", 400, 16, 64, 12, 300, "C5"),
)
