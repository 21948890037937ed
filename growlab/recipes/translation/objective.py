"""Translation objective: label-smoothed cross-entropy, fairseq's beam search, and BLEU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.errors import UserError
from growlab.base.ranks import gather
from growlab.base.settings import whole
from growlab.lab.training.objectives import TokenPrediction
from growlab.recipes.translation.data import TranslationData
from growlab.recipes.translation.network import FairseqTransformer, fairseq_checkpoint
from growlab.recipes.translation.sentence_pairs import extra_module, fairseq_module


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Return BLEU (0 to 100) and sacrebleu's signature, and both on Moses' tokens as `tokenised_bleu`."""
    score, signature = _scored(hypotheses, references, "13a")
    moses = extra_module("sacremoses").MosesTokenizer(language)

    def words(sentences: Sequence[str]) -> list[str]:
        return [moses.tokenize(sentence, return_str=True, escape=False) for sentence in sentences]

    tokenised, tokenised_signature = _scored(words(hypotheses), words(references), "none")
    scores = {"bleu": score, "tokenised_bleu": tokenised, "bleu_signature": signature}
    return {**scores, "tokenised_bleu_signature": tokenised_signature}


def _scored(hypotheses: Sequence[str], references: Sequence[str], tokenise: str) -> tuple[float, str]:
    # `force` suppresses a warning about tokenised text, which is intended here.
    metric = extra_module("sacrebleu.metrics").BLEU(tokenize=tokenise, force=True)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())


def make_generator(network: FairseqTransformer, dictionary: Any, output_factor: float, **settings: Any) -> Any:
    """Return fairseq's `SequenceGenerator` for a network of any widths.

    Every prefix is recomputed from its start, because the caches of fairseq's layers assume that a head's width is the
    layers' width divided by the number of heads, which may not be so while a network grows.
    """
    models = fairseq_module("fairseq.models")

    class Encoder(models.FairseqEncoder):
        def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None) -> dict[str, list[Tensor]]:
            memory_BSC, real_B11S = network.encode(src_tokens)
            return {"memory": [memory_BSC], "real": [real_B11S]}

        def reorder_encoder_out(
            self, encoder_out: dict[str, list[Tensor]], new_order: Tensor
        ) -> dict[str, list[Tensor]]:
            return {name: [tensor.index_select(0, new_order)] for name, (tensor,) in encoder_out.items()}

    class Decoder(models.FairseqDecoder):
        def forward(self, prev_output_tokens: Tensor, encoder_out: dict[str, list[Tensor]]) -> tuple[Tensor, dict]:
            (memory_BSC,), (real_B11S,) = encoder_out["memory"], encoder_out["real"]
            features_BTE = network.decode(prev_output_tokens, memory_BSC, real_B11S)
            # fairseq needs only the last position and no attention weights.
            return network.output(features_BTE[:, -1:]) * output_factor, {"attn": [None]}

        def max_positions(self) -> int:
            # Position encodings are computed for any length.
            return 1 << 20

    model = models.FairseqEncoderDecoderModel(Encoder(dictionary), Decoder(dictionary))
    generator = fairseq_module("fairseq.sequence_generator").SequenceGenerator
    return generator([model.eval()], dictionary, **settings)


@torch.no_grad()
def translations(generator: Any, source_BS: Tensor, padding: int, end: int) -> list[Tensor]:
    """Return the best hypothesis for each sentence as token ids."""
    lengths_B = (source_BS.ne(padding) & source_BS.ne(end)).sum(1)
    sample = {"net_input": {"src_tokens": source_BS, "src_lengths": lengths_B}}
    return [hypotheses[0]["tokens"].cpu() for hypotheses in generator.generate([], sample)]


class Translation(TokenPrediction):
    """Training loss and BLEU of a translation network.

    Args:
        label_smoothing: as in `TokenPrediction`.
        beam_size: number of hypotheses in beam search.
        length_penalty: below 1 favours short translations, above 1 long ones.
        max_len_a: a translation has at most `max_len_a * source + max_len_b` tokens.
        max_len_b: see `max_len_a`.
        bleu_every_n_epochs: also translate the validation set every n epochs; None: only the test set, after training.
    """

    evaluated_names = ("bleu", "tokenised_bleu")

    def __init__(
        self,
        label_smoothing: float = 0.1,
        beam_size: int = 5,
        length_penalty: float = 1.0,
        max_len_a: float = 1.2,
        max_len_b: int = 10,
        bleu_every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(label_smoothing)
        whole(1, beam_size=beam_size, bleu_every_n_epochs=bleu_every_n_epochs or 1)
        self.bleu_every_n_epochs = bleu_every_n_epochs
        self._settings = {"beam_size": beam_size, "len_penalty": length_penalty}
        self._settings |= {"max_len_a": max_len_a, "max_len_b": max_len_b}
        self._data: TranslationData | None = None
        self._tested: list[str] = []

    def bind(self, data: Any) -> None:
        """Take the padding and the dictionaries from the data."""
        if not isinstance(data, TranslationData):
            raise UserError("objective=translation is for sentence pairs; choose data=iwslt14 or data=multi30k.")
        self.padding, self._data = data.padding, data

    def evaluate(self, task: Any, split: str, epoch: int | None) -> dict[str, Any]:
        """Compute BLEU of the test set, and of the validation set every n epochs."""
        every = self.bleu_every_n_epochs
        if epoch is not None and (every is None or (epoch + 1) % every):
            return {}
        sentences = self.translate(task.network, split, task.grower.state.output_factor)
        scores = bleu(sentences, self._data.references(split), self._data.preparation.target)
        if epoch is None:
            self._tested = sentences
        return scores if epoch is None else {name: scores[name] for name in self.evaluated_names}

    def translate(self, network: FairseqTransformer, split: str, output_factor: float = 1.0) -> list[str]:
        """Translate "val" or "test" in order; each rank translates its share and receives all."""
        data = self._data
        generator = make_generator(network, data.pairs.target_dictionary, output_factor, **self._settings)
        device = next(network.parameters()).device
        loader = data.evaluation(split)
        mine: dict[int, str] = {}
        for positions, (source_BS, *_) in zip(loader.plan.batches(), loader, strict=True):
            hypotheses: list[Tensor] = translations(generator, source_BS.to(device), data.padding, data.end)
            mine.update(zip(positions.tolist(), map(data.text, hypotheses), strict=True))
        everyone = {index: text for part in gather(mine) for index, text in part.items()}
        return [everyone[index] for index in range(len(everyone))]

    def exports(self, network: nn.Module) -> dict[str, Any]:
        """Return the network as a fairseq checkpoint, and the translations of the test set as text, by file name."""
        if not isinstance(network, FairseqTransformer):
            return {}
        columns = (self._data.sources("test"), self._data.references("test"), self._tested)
        rows = [("source", "reference", "translation"), *zip(*columns, strict=True)]
        return {
            "fairseq.pt": fairseq_checkpoint(network, self._data.pairs, self.label_smoothing),
            "translations.tsv": "".join("\t".join(cell.replace("\t", " ") for cell in row) + "\n" for row in rows),
        }
