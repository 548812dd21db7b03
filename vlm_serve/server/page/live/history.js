// The last minutes of the server, from the `status` messages of the event stream: totals become
// rates. Times are milliseconds.

const SPAN_MS = 5 * 60_000;

export class History {
  #statuses = [];

  /** Takes one status; a server that was started anew begins a new history. */
  add(status, now) {
    const last = this.#statuses.at(-1);
    if (last && (status.steps ?? 0) < (last.status.steps ?? 0)) this.#statuses = [];
    this.#statuses.push({ status, now });
    while (this.#statuses[0].now < now - SPAN_MS) this.#statuses.shift();
  }

  latest() {
    return this.#statuses.at(-1)?.status ?? null;
  }

  /** [time, value] of what each status says; null where it says nothing. */
  of(read) {
    return this.#statuses.map(({ status, now }) => [now, read(status) ?? null]);
  }

  /** [time, value a second] of a total. */
  rateOf(read) {
    return this.#between((before, after, seconds) =>
      difference(read, before, after, (rise) => rise / seconds),
    );
  }

  /** [time, share] of how much of one total's rise another one's was; null where nothing rose. */
  shareOf(part, whole) {
    return this.#between((before, after) =>
      difference(whole, before, after, (all) =>
        all > 0 ? difference(part, before, after, (some) => some / all) : null,
      ),
    );
  }

  #between(compute) {
    return this.#statuses.slice(1).map(({ status, now }, index) => {
      const before = this.#statuses[index];
      return [now, compute(before.status, status, (now - before.now) / 1000)];
    });
  }
}

function difference(read, before, after, use) {
  const [first, last] = [read(before), read(after)];
  return Number.isFinite(first) && Number.isFinite(last) ? use(last - first) : null;
}
