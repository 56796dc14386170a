// The words of the tab train.

export const words = {
  en: {
    trainSoon: "Not made yet.",
  },
  zh: {
    trainSoon: "尚未完成。",
  },
};
