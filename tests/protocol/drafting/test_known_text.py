from meshllm.protocol.drafting.known_text import KnownText


def test_the_rest_of_the_text_is_drafted_until_its_end() -> None:
    drafter = KnownText([1, 2, 3, 4]).begin()

    assert (drafter.look(), drafter.draft(2), drafter.draft(9)) == (3, (1, 2), (1, 2, 3, 4))
    drafter.extend([1, 2, 3])
    assert (drafter.look(), drafter.draft(9)) == (3, (4,))
    drafter.extend([4])
    assert (drafter.look(), drafter.draft(9)) == (None, ())
    drafter.extend([9])
    assert drafter.look() is None


def test_each_drafter_starts_at_the_first_token() -> None:
    text = KnownText([1, 2])
    text.begin().extend([1])
    text.keep([7])

    assert text.begin().draft(9) == (1, 2)
