"""Torch modules of the tests: each function builds one, with the same weights in every call."""

import torch
from torch import nn


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4))


class Vit(nn.Module):
    """A ViT for images [B, 3, 8, 8], with patches of 4 x 4, one block and four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls, self.positions = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(0.02 * torch.randn(1, 5, 16))
        block = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


def vit() -> nn.Module:
    torch.manual_seed(0)
    return Vit()


def gpt2(vocab: int = 320, dropout: float = 0.0, width: int = 16) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=vocab, n_positions=64, n_embd=width, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops)).train()


class Words(nn.Module):
    """A model of tokens that takes nothing but tokens, and returns a tensor."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 16), nn.Linear(16, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def words(vocab: int = 320) -> nn.Module:
    torch.manual_seed(0)
    return Words(vocab)


def number() -> int:
    return 3


class TokenMean(nn.Module):
    """A reward model: the mean of the tokens' values, higher for low tokens."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.values = nn.Embedding(vocab, 1)
        with torch.no_grad():
            self.values.weight.copy_(1 - torch.arange(vocab)[:, None] / vocab)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        values = self.values(tokens)[..., 0] * attention_mask
        return values.sum(1) / attention_mask.sum(1)


def token_mean(vocab: int = 320) -> nn.Module:
    return TokenMean(vocab)


def classifier() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    sizes = dict(vocab_size=320, n_positions=64, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
    return GPT2ForSequenceClassification(GPT2Config(**sizes, **ids)).eval()
