// Versions of a conversation: an edited question begins another one, and the old one is kept.
//
// conversation.branches = {id of the turn before, or "start": {active, tails: [[turn] or null]}}
//   The turns of the version that is shown stand in conversation.turns; its own place is null.

const START = "start";

function keyOf(conversation, index) {
  return conversation.turns[index - 1]?.id ?? START;
}

/** Begins another version at turn `index`; the turns from there on are kept beside it. */
export function branch(conversation, index) {
  conversation.branches ??= {};
  const known = (conversation.branches[keyOf(conversation, index)] ??= { active: 0, tails: [null] });
  known.tails[known.active] = conversation.turns.splice(index);
  known.active = known.tails.push(null) - 1;
}

/** How many versions begin at turn `index`, and which of them is shown: {number, count}, from 1. */
export function versionAt(conversation, index) {
  const known = conversation.branches?.[keyOf(conversation, index)];
  return { number: (known?.active ?? 0) + 1, count: known?.tails.length ?? 1 };
}

/** Shows version `number` of those that begin at turn `index`. */
export function showVersion(conversation, index, number) {
  const known = conversation.branches?.[keyOf(conversation, index)];
  const tail = known?.tails[number - 1];
  if (!tail) return;
  known.tails[known.active] = conversation.turns.splice(index);
  known.tails[number - 1] = null;
  known.active = number - 1;
  conversation.turns.push(...tail);
}

/** The turns of all versions. */
export function everyTurn({ turns, branches }) {
  const others = Object.values(branches ?? {}).flatMap(({ tails }) => tails.filter(Boolean));
  return [...turns, ...others.flat()];
}

/** A reload has ended what was still streaming. */
export function endWhatWasRunning(conversation) {
  for (const { answer } of everyTurn(conversation))
    if (answer.finish === null) answer.finish = "stopped";
}
