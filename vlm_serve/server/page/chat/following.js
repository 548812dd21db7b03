// Keeps the end of what grows in sight, unless the reader has scrolled up or does something there.

const NEAR_END = 80;

export class Following {
  #area;
  #last = 0;
  #follows = true;

  /**
   * @param {Element} area that scrolls
   * @param {Element} content of it
   */
  constructor(area, content) {
    this.#area = area;
    area.addEventListener("scroll", () => this.#scrolled());
    // What is opened, selected or copied stays where it is.
    area.addEventListener("pointerdown", () => this.stop());
    area.addEventListener("keydown", () => this.stop());
    const observer = new ResizeObserver(() => this.#follows && this.#toEnd());
    observer.observe(content);
    observer.observe(area);
  }

  /** Goes to the end and stays there. */
  begin() {
    this.#follows = true;
    this.#toEnd();
  }

  /** Stays where it is. */
  stop() {
    this.#follows = false;
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.#area;
    // Content that grows leaves the end without a scroll; only a reader goes up.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) this.#follows = true;
    else if (scrollTop < this.#last) this.#follows = false;
    this.#last = scrollTop;
  }

  #toEnd() {
    this.#area.scrollTop = this.#area.scrollHeight;
  }
}
