// The words of the tab chat.

export const words = {
  en: {
    chatSoon: "Not made yet.",
  },
  zh: {
    chatSoon: "尚未完成。",
  },
};
