// Conversations and media in the browser's IndexedDB, so that they are there after a reload. Where
// the browser keeps nothing (a private window, say) they are held in memory.
//
// A medium is {id, conversation, kind, name, blob, hashes, example}: `hashes` are those by which the
// server's reports name it; `example` is true of the page's own. A conversation is what conversation.js makes.

const NAMES = ["conversations", "media"];

/** What is used of an object store, in memory. */
class MemoryStore {
  #records = new Map();

  getAll() {
    return [...this.#records.values()].map((record) => structuredClone(record));
  }

  put(record) {
    this.#records.set(record.id, structuredClone(record));
  }

  delete(id) {
    this.#records.delete(id);
  }
}

let opened = null;

/** The database, or null if the browser has none. */
function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open("vlm-serve", 1);
    asked.onupgradeneeded = () =>
      NAMES.forEach((name) => asked.result.createObjectStore(name, { keyPath: "id" }));
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  }).catch(() => null);
  return opened;
}

/** False if what is written here is gone with the tab. */
export async function isLasting() {
  return (await open()) !== null;
}

/** Reads and writes of the records of one name. */
function recordsOf(name) {
  const memory = new MemoryStore();
  const run = async (mode, act) => {
    const database = await open();
    if (database === null) return act(memory);
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(name, mode);
      const asked = act(transaction.objectStore(name));
      transaction.oncomplete = () => resolve(asked.result);
      transaction.onabort = () => reject(transaction.error);
    });
  };
  return {
    all: () => run("readonly", (store) => store.getAll()),
    put: (record) => run("readwrite", (store) => store.put(record)),
    remove: (id) => run("readwrite", (store) => store.delete(id)),
  };
}

export const conversations = recordsOf("conversations");
export const media = recordsOf("media");
