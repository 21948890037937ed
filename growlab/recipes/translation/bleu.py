"""BLEU of translations: sacrebleu's, and on Moses' words as the field reports for IWSLT'14."""

from collections.abc import Sequence
from typing import Any

from growlab.recipes.translation.library import extra_module


def bleu(hypotheses: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Scores from 0 to 100.

    Args:
        hypotheses: one translation a sentence.
        references: likewise.
        language: of both, two letters, for Moses' tokeniser.

    Returns:
        `bleu` and its `bleu_signature`; `tokenised_bleu`, on Moses' words, and `tokenised_bleu_signature`.
    """
    score, signature = _scored(hypotheses, references, "13a")
    moses = extra_module("sacremoses").MosesTokenizer(language)

    def words(sentences: Sequence[str]) -> list[str]:
        return [moses.tokenize(sentence, return_str=True, escape=False) for sentence in sentences]

    tokenised, tokenised_signature = _scored(words(hypotheses), words(references), "none")
    return {
        "bleu": score,
        "tokenised_bleu": tokenised,
        "bleu_signature": signature,
        "tokenised_bleu_signature": tokenised_signature,
    }


def _scored(hypotheses: Sequence[str], references: Sequence[str], tokenise: str) -> tuple[float, str]:
    # `force`: sacrebleu warns of text that is tokenised already, which is meant here.
    metric = extra_module("sacrebleu.metrics").BLEU(tokenize=tokenise, force=True)
    score = metric.corpus_score(list(hypotheses), [list(references)])
    return float(score.score), str(metric.get_signature())
